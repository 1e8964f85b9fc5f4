"""Laws: each is one rule with its condition, its numeric class and its refusals."""
