"""Decide which bytes go where before any is moved. Pure: nothing here opens a file."""
