"""The intermediate form: one immutable node type, one op table, one printer, one checker."""
