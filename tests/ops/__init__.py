"""Tests of the kernel library."""
