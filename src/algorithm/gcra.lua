-- The twin of gcra.rs: it counts as the meter does. A charge waits until the burst has room for it.
return meter(function(_, wanted, room)
  return wanted - room, wanted - 2^52
end)
