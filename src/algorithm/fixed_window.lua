-- The twin of fixed_window.rs, which says what it counts. A state is { window number, count }, saved as "<window> <count>".
local floor, format, match, max, min = math.floor, string.format, string.match, math.max, math.min

-- A counter nobody has used.
local fresh = { 0, 0 }
-- 2^52, as in algorithm.rs, and 2^53, below which every whole number is exact.
local most_counted, most_exact = 4503599627370496, 9007199254740992

local function load(text, length)
  local window, count = match(text, '^(%d+) (%d+)$')
  window, count = tonumber(window), tonumber(count)
  if window and (window + 1) * length <= most_exact and count <= most_counted then
    return { window, count }
  end
end

local function save(state)
  return format('%.0f %.0f', state[1], state[2])
end

local function step(state, now, hits, back, limit, _, length)
  local window, used = floor(now / length), 0
  -- A clock that steps back stays in the window it had reached.
  if window <= state[1] then
    window, used = state[1], state[2]
  end
  local wanted = used + hits
  local is_admitted = wanted <= limit or back > 0
  local count = min(max(wanted - back, 0), most_counted)
  local reset = (window + 1) * length - now
  local left, retry = count, -1
  if not is_admitted then
    left = used
    if hits <= limit then
      retry = reset
    end
  end
  return is_admitted, max(limit - left, 0), reset, retry, { window, count }
end

local function idle_at(state, length)
  return (state[1] + 1) * length
end

-- From the window of the charge, and from no other.
local function undo(state, _, at, hits, _, length)
  if state[1] ~= floor(at / length) then
    return state
  end
  return { state[1], max(state[2] - hits, 0) }
end

return { fresh = fresh, load = load, save = save, step = step, idle_at = idle_at, undo = undo }
