-- The twin of fixed_window.rs, which says what it counts. A state is a window number and a count, packed.
-- Above 2^53 a number is no longer exact; 2^52 is the most that is ever counted (algorithm.rs).

local function load(text, length)
  if not text then
    return 0, 0
  end
  local window, count
  if #text == 16 then
    window, count = struct.unpack('<I8I8', text)
  end
  local is_old = not window or window > 2^53
  if is_old then
    window, count = string.match(text, '^(%d+) (%d+)$')
  end
  if window then
    window, count = window + 0, count + 0
    if (window + 1) * length <= 2^53 and count <= 2^52 then
      return window, count, nil, is_old
    end
  end
end

local function save(window, count)
  return struct.pack('<I8I8', window, count)
end

local function step(of, count, _, now, hits, back, limit, _, length)
  local window, used = (now - now % length) / length, 0
  -- A clock that steps back stays in the window it had reached.
  if window <= of then
    window, used = of, count
  end
  local wanted = used + hits
  -- Hits given back are taken back whatever is used.
  local is_admitted = wanted <= limit or back > 0
  count = wanted - back
  if count < 0 then count = 0 elseif count > 2^52 then count = 2^52 end
  local reset = (window + 1) * length - now
  local left, retry = count, -1
  if not is_admitted then
    left = used
    if hits <= limit then retry = reset end
  end
  local remaining = limit - left
  if remaining < 0 then remaining = 0 end
  return is_admitted, remaining, reset, retry, window, count
end

local function kept_until(window, _, _, length)
  return (window + 1) * length
end

-- From the window of the charge, and from no other.
local function undo(window, count, _, _, at, hits, _, length)
  if window ~= (at - at % length) / length then
    return window, count
  end
  return window, math.max(count - hits, 0)
end

return load, save, step, kept_until, undo
