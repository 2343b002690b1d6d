-- The twin of fixed_window.rs, which says what it counts. A state is { window number, count }, saved as "<window> <count>".
-- Above 2^53 a number is no longer exact; 2^52 is the most that is ever counted (algorithm.rs).

local function load(text, length)
  local window, count = string.match(text, '^(%d+) (%d+)$')
  if window then
    window, count = window + 0, count + 0
    if (window + 1) * length <= 2^53 and count <= 2^52 then
      return { window, count }
    end
  end
end

local function save(state)
  return string.format('%.0f %.0f', state[1], state[2])
end

local function step(state, now, hits, back, limit, _, length)
  local window, used = (now - now % length) / length, 0
  -- A clock that steps back stays in the window it had reached.
  if window <= state[1] then
    window, used = state[1], state[2]
  end
  local wanted = used + hits
  -- Hits given back are taken back whatever is used.
  local is_admitted = wanted <= limit or back > 0
  local count = wanted - back
  if count < 0 then count = 0 elseif count > 2^52 then count = 2^52 end
  local reset = (window + 1) * length - now
  local left, retry = count, -1
  if not is_admitted then
    left = used
    if hits <= limit then retry = reset end
  end
  local remaining = limit - left
  if remaining < 0 then remaining = 0 end
  return is_admitted, remaining, reset, retry, { window, count }
end

local function idle_at(state, length)
  return (state[1] + 1) * length
end

-- From the window of the charge, and from no other.
local function undo(state, _, at, hits, _, length)
  if state[1] ~= (at - at % length) / length then
    return state
  end
  return { state[1], math.max(state[2] - hits, 0) }
end

return { fresh = { 0, 0 }, load = load, save = save, step = step, idle_at = idle_at, undo = undo }
