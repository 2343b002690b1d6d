-- The twin of leaky_bucket.rs: it counts as the meter does. A charge waits until what stood in the
-- bucket before it has leaked.
return meter(function(level, wanted, room)
  return level, wanted - room
end)
