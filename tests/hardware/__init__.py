"""Tests of the hardware descriptions."""
