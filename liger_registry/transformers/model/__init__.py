"""The losses that models' forwards call."""
