# Sourced by the scripts: makes or reuses .venv in the repository and sets PYTHON to its interpreter.
# TVM_TILE_PYTHON names an interpreter to use instead (it gets what it lacks); TVM_TILE_TORCH is the requirement to install
# where torch is missing (default: torch==2.13.0; its CPU build where there is no GPU), TVM_TILE_TORCH_INDEX the package
# index to take the CPU build from.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

missing() { # prints the requirements of setup.cfg (with the extras given) that the interpreter lacks
    "$PYTHON" - "$ROOT/setup.cfg" "$@" <<'PY'
import configparser, importlib.metadata as metadata, re, sys

config = configparser.ConfigParser()
config.read(sys.argv[1])
lines = config["options"]["install_requires"].splitlines()
for extra in sys.argv[2:]:
    lines += config["options.extras_require"][extra].splitlines()


def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def satisfied(have, clauses):
    for operator, version in re.findall(r"(==|>=|<=|<|>)\s*([\w.]+)", clauses):
        a, b = numbers(have), numbers(version)
        size = max(len(a), len(b))
        a, b = a + [0] * (size - len(a)), b + [0] * (size - len(b))
        if not {"==": a == b, ">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b}[operator]:
            return False
    return True


for line in lines:
    line = line.split("#")[0].strip()
    if not line:
        continue
    name, clauses = re.match(r"([\w.-]+)(.*)", line).groups()
    try:
        have = metadata.version(name)
    except metadata.PackageNotFoundError:
        have = None
    if have is None or not satisfied(have, clauses):
        print(line)
PY
}

prepare() { # prepare EXTRA...: the environment with the package's requirements and those of the extras
    if [ -n "${TVM_TILE_PYTHON:-}" ]; then
        PYTHON="$TVM_TILE_PYTHON"
    else
        PYTHON="$ROOT/.venv/bin/python"
        if [ ! -x "$PYTHON" ]; then
            local base
            for base in python3 python3.12 python3.11 python3.13 python3.10; do
                if command -v "$base" >/dev/null && "$base" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
                    break
                fi
                base=""
            done
            [ -n "$base" ] || { echo "error: Python 3.10 to 3.13 with the venv module is needed (Debian: apt install python3-venv)" >&2; exit 1; }
            echo "making .venv with $base" >&2
            "$base" -m venv "$ROOT/.venv"
        fi
    fi
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    local need
    need="$(missing "$@" | grep -v '^torch$' || true)"
    if [ -n "$need" ]; then
        echo "installing: $(echo $need)" >&2
        printf '%s\n' "$need" | "$PYTHON" -m pip install --quiet --disable-pip-version-check -r /dev/stdin
    fi
    if [[ " $* " == *" torch "* || " $* " == *" test "* ]] && ! "$PYTHON" -c 'import torch' 2>/dev/null; then
        local spec="${TVM_TILE_TORCH:-torch==2.13.0}"
        if has_gpu; then
            echo "installing: $spec" >&2
            "$PYTHON" -m pip install --quiet --disable-pip-version-check "$spec"
        else
            echo "installing: $spec (CPU build)" >&2
            install_cpu_torch "$spec"
        fi
    fi
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

install_cpu_torch() { # a CPU build where pip offers one, else whatever build it has
    local spec="$1" pip=("$PYTHON" -m pip install --quiet --disable-pip-version-check)
    if [ -n "${TVM_TILE_TORCH_INDEX:-}" ]; then
        "${pip[@]}" --index-url "$TVM_TILE_TORCH_INDEX" "$spec"
    elif [[ "$spec" == torch==* && "$spec" != *+* ]] && "${pip[@]}" "$spec+cpu" 2>/dev/null; then
        :
    else
        echo "pip offers no CPU build of torch: installing the default one (set TVM_TILE_TORCH_INDEX to a package index with CPU builds to avoid that)" >&2
        "${pip[@]}" "$spec"
    fi
}
