"""Commands of ``tvm-tile``, one a module."""
