"""Side-by-side measurements, each runnable alone; the documents quote what they print."""
