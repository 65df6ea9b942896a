"""Programs beside memstate: they demonstrate, check, measure, compile and tune it."""
