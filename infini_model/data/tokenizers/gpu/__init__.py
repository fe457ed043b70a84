"""Byte-level BPE as an array program, for the device that training runs on."""
