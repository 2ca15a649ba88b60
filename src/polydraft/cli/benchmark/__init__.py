"""The commands that measure speed: `polydraft bench` with its report, `tune` and `demo`."""
