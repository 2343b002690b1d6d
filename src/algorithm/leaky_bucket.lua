-- The twin of leaky_bucket.rs: it counts as the meter does.
return meter()
