"""Programs around the library: training the tiny base, launching, measuring, exporting."""
