"""Everything dl2d saw and decided, in SQL. The only package that knows SQL."""
