"""Recording of a call: its operators, its side effects, what it reads."""
