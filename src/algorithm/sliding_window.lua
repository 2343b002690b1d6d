-- The twin of sliding_window.rs, which says what it counts. A state is { window number, hits of the window before, hits of
-- this one }, saved as those three numbers.
-- Above 2^53 a number is no longer exact; 2^52 is the most that is ever counted (algorithm.rs); a window has at most 2^20
-- ticks.

local function load(text, length)
  local window, previous, current = string.match(text, '^(%d+) (%d+) (%d+)$')
  if window then
    window, previous, current = window + 0, previous + 0, current + 0
    if (window + 2) * length <= 2^53 and previous <= 2^52 and current <= 2^52 then
      return { window, previous, current }
    end
  end
end

local function save(state)
  return string.format('%.0f %.0f %.0f', state[1], state[2], state[3])
end

-- The window of a moment, the counts that matter then, and how many ticks of it are left.
local function counts(state, now, length, tick_us)
  local window, passed = (now - now % length) / length, now % length
  local left = (length - (passed - passed % tick_us)) / tick_us
  if window > state[1] + 1 then
    return window, 0, 0, left
  elseif window > state[1] then
    return window, state[3], 0, left
  elseif window < state[1] then
    -- A clock that steps back waits at the beginning of the window it had reached.
    left = length / tick_us
  end
  return state[1], state[2], state[3], left
end

-- The share of some hits that belongs to the ticks left, rounded up. In two parts, so that no product leaves 2^53.
local function share(hits, left, ticks)
  local rest = hits % ticks
  return (hits - rest) / ticks * left + math.ceil(rest * left / ticks)
end

-- The moment at which the estimate, which is above it, has come down to `most`: in this window as the share of the previous
-- one goes down, or in the next as that of this one does.
local function fits_at(most, window, previous, current, ticks, length, tick_us)
  local room, shrinking = most - current, previous
  if room < 0 then
    window, room, shrinking = window + 1, most, current
  end
  local left = ticks
  if shrinking > 0 then
    local product = room * ticks
    left = math.min((product - product % shrinking) / shrinking, ticks)
  end
  return window * length + (ticks - left) * tick_us
end

local function idle_at(state, length)
  if state[3] > 0 then
    return (state[1] + 2) * length
  elseif state[2] > 0 then
    return (state[1] + 1) * length
  end
  return 0
end

local function step(state, now, hits, back, limit, _, length, tick_us)
  local ticks = length / tick_us
  local window, previous, current, left = counts(state, now, length, tick_us)
  local used = current + share(previous, left, ticks)
  -- Hits given back are taken back whatever is used.
  local is_admitted = used + hits <= limit or back > 0
  -- Those given back are the latest: of this window first, then of the one before.
  local with = current + hits
  local charged = {
    window, math.max(previous - math.max(back - with, 0), 0), math.min(math.max(with - back, 0), 2^52),
  }
  local idle, retry = 0, -1
  if is_admitted then
    used = charged[3] + share(charged[2], left, ticks)
    idle = idle_at(charged, length)
  else
    idle = idle_at({ window, previous, current }, length)
    if hits <= limit then
      retry = math.max(fits_at(limit - hits, window, previous, current, ticks, length, tick_us) - now, 0)
    end
  end
  return is_admitted, math.max(limit - used, 0), math.max(idle - now, 0), retry, charged
end

-- From the window of the charge, as far as that still counts.
local function undo(state, _, at, hits, _, length)
  local window = (at - at % length) / length
  if window == state[1] then
    return { window, state[2], math.max(state[3] - hits, 0) }
  elseif window == state[1] - 1 then
    return { state[1], math.max(state[2] - hits, 0), state[3] }
  end
  return state
end

return { fresh = { 0, 0, 0 }, load = load, save = save, step = step, idle_at = idle_at, undo = undo }
