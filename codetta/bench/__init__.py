"""Benchmarks: each is a protocol and a table; `codetta bench X --json` ends with one JSON object that can be recorded."""
