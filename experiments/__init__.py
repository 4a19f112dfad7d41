"""Runnable experiments: demonstrations, measurements and reproductions of the papers."""
