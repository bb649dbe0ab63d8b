/* Stands in for NVIDIA's driver library on machines without a GPU, so that TVM's CUDA runtime library loads and exported
 * kernels hold compiled cubins. Every call fails with CUDA_ERROR_UNKNOWN: nothing can run through it. */
#define FAIL(name) int name(void) { return 999; }
FAIL(cuDeviceGetName)
FAIL(cuFuncSetAttribute)
FAIL(cuGetErrorName)
FAIL(cuGetErrorString)
FAIL(cuLaunchKernelEx)
FAIL(cuModuleGetFunction)
FAIL(cuModuleLoadData)
FAIL(cuModuleUnload)
FAIL(cuTensorMapEncodeTiled)
