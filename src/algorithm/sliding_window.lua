-- The twin of sliding_window.rs, which says what it counts. A state is a window number, the hits of the window before, and
-- those of this one, packed.
-- Above 2^53 a number is no longer exact; 2^52 is the most that is ever counted (algorithm.rs); a window has at most 2^20
-- ticks.

local function load(text, length)
  if not text then
    return 0, 0, 0
  end
  local window, previous, current
  if #text == 24 then
    window, previous, current = struct.unpack('<I8I8I8', text)
  end
  local is_old = not window or window > 2^53
  if is_old then
    window, previous, current = string.match(text, '^(%d+) (%d+) (%d+)$')
  end
  if window then
    window, previous, current = window + 0, previous + 0, current + 0
    if (window + 2) * length <= 2^53 and previous <= 2^52 and current <= 2^52 then
      return window, previous, current, is_old
    end
  end
end

local function save(window, previous, current)
  return struct.pack('<I8I8I8', window, previous, current)
end

-- The window of a moment, the counts that matter then, and how many ticks of it are left.
local function counts(window, previous, current, now, length, tick_us)
  local reached, passed = (now - now % length) / length, now % length
  local left = (length - (passed - passed % tick_us)) / tick_us
  if reached > window + 1 then
    return reached, 0, 0, left
  elseif reached > window then
    return reached, current, 0, left
  elseif reached < window then
    -- A clock that steps back waits at the beginning of the window it had reached.
    left = length / tick_us
  end
  return window, previous, current, left
end

-- The share of some hits that belongs to the ticks left, rounded down. In two parts, so that no product leaves 2^53.
local function share(hits, left, ticks)
  if hits == 0 then
    return 0
  end
  local rest = hits % ticks
  return (hits - rest) / ticks * left + math.floor(rest * left / ticks)
end

-- The first moment at which the estimate, which is above it, has come down to `most`: in this window as the share of the previous
-- one goes down, or in the next as that of this one does.
local function fits_at(most, window, previous, current, ticks, length, tick_us)
  local room, shrinking = most - current, previous
  if room < 0 then
    window, room, shrinking = window + 1, most, current
  end
  local left = ticks
  if shrinking > 0 then
    -- The most ticks left of which the share is below `room + 1`.
    local product = (room + 1) * ticks - 1
    left = math.min((product - product % shrinking) / shrinking, ticks)
  end
  return window * length + (ticks - left) * tick_us
end

-- The end of the last window in which they count, which changes once a window.
local function kept_until(window, previous, current, length)
  if current > 0 then
    return (window + 2) * length
  elseif previous > 0 then
    return (window + 1) * length
  end
  return 0
end

local function step(window, previous, current, now, hits, back, limit, _, length, tick_us)
  local ticks, left = length / tick_us
  window, previous, current, left = counts(window, previous, current, now, length, tick_us)
  local used = current + share(previous, left, ticks)
  -- Hits given back are taken back whatever is used.
  local is_admitted = used + hits <= limit or back > 0
  -- Those given back are the latest: of this window first, then of the one before.
  local with = current + hits
  local before, this = previous, with - back
  if this < 0 then
    before, this = math.max(previous + this, 0), 0
  elseif this > 2^52 then
    this = 2^52
  end
  local idle, retry = 0, -1
  if is_admitted then
    used = this + share(before, left, ticks)
    if before + this > 0 then
      idle = fits_at(0, window, before, this, ticks, length, tick_us)
    end
  else
    if previous + current > 0 then
      idle = fits_at(0, window, previous, current, ticks, length, tick_us)
    end
    if hits <= limit then
      retry = math.max(fits_at(limit - hits, window, previous, current, ticks, length, tick_us) - now, 0)
    end
  end
  local remaining, reset = limit - used, idle - now
  if remaining < 0 then remaining = 0 end
  if reset < 0 then reset = 0 end
  return is_admitted, remaining, reset, retry, window, before, this
end

-- From the window of the charge, as far as that still counts.
local function undo(window, previous, current, _, at, hits, _, length)
  local of = (at - at % length) / length
  if of == window then
    current = math.max(current - hits, 0)
  elseif of == window - 1 then
    previous = math.max(previous - hits, 0)
  end
  return window, previous, current
end

return load, save, step, kept_until, undo
