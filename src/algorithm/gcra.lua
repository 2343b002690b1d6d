-- The twin of gcra.rs: it counts as the meter does.
return meter()
