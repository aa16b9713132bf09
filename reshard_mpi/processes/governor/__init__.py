"""Admit transforms by memory, for all processes of a user on a host."""
