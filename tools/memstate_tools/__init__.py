"""Programs beside memstate: they show, check, measure, compile and tune it."""
