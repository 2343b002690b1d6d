-- The twin of meter.rs, which says what it counts. A state is { tick, level, slowest }, saved as those three numbers: the
-- slowest is the smallest limit it was charged against, under which it is idle last.
local ceil, floor, format, match, max, min = math.ceil, math.floor, string.format, string.match, math.max, math.min

-- The largest limit, 2^32 - 1: whatever is charged first is slower.
local most_hits = 4294967295
-- A counter nobody has used.
local fresh = { 0, 0, most_hits }
-- 2^52, as in algorithm.rs, and 2^53, below which every whole number is exact.
local most_counted, most_exact = 4503599627370496, 9007199254740992
-- Ten years in microseconds, as in meter.rs.
local longest_wait = 315360000000000

local function load(text, _, tick_us)
  local tick, level, slowest = match(text, '^(%d+) (%d+) (%d+)$')
  tick, level, slowest = tonumber(tick), tonumber(level), tonumber(slowest)
  if tick and tick * tick_us <= most_exact and level <= most_counted and slowest >= 1 and slowest <= most_hits then
    return { tick, level, slowest }
  end
end

local function save(state)
  return format('%.0f %.0f %.0f', state[1], state[2], state[3])
end

-- The tick of a moment and the level then. What drains may be above 2^53 and no longer exact, but then nothing is left.
local function drained(state, now, limit, tick_us)
  local tick = floor(now / tick_us)
  -- A clock that steps back waits where it was: nothing drains twice.
  if tick <= state[1] then
    return state[1], state[2]
  end
  return tick, max(state[2] - (tick - state[1]) * limit, 0)
end

-- How long from now until so many grains have drained, at most the longest wait; its ticks are cut first, so that no
-- product leaves 2^53.
local function wait(grains, now, tick, limit, tick_us)
  local ticks = 0
  if limit > 0 then
    ticks = min(ceil(grains / limit), longest_wait / tick_us + 1)
  end
  return min(max((tick + ticks) * tick_us - now, 0), longest_wait)
end

local function step(state, now, hits, back, limit, burst, length, tick_us)
  local grains = length / tick_us
  local tick, level = drained(state, now, limit, tick_us)
  local room, wanted = burst * grains, level + hits * grains
  local is_admitted = wanted <= room or back > 0
  local charged = min(max(wanted - back * grains, 0), most_counted)
  local left = is_admitted and charged or level
  local reset, retry = 0, -1
  if not is_admitted and hits <= burst and limit > 0 then
    retry = wait(wanted - room, now, tick, limit, tick_us)
    reset = retry
  elseif left > 0 then
    reset = wait(left, now, tick, limit, tick_us)
  end
  local remaining = floor(max(room - left, 0) / grains)
  return is_admitted, remaining, reset, retry, { tick, charged, min(state[3], limit) }
end

local function idle_at(state, _, tick_us)
  return (state[1] + floor(state[2] / state[3]) + 1) * tick_us
end

-- What the charge added, less what has drained since: that much at least still stands.
local function undo(state, now, at, hits, limit, length, tick_us)
  local tick, level = drained(state, now, limit, tick_us)
  local back = max(hits * (length / tick_us) - (tick - floor(at / tick_us)) * limit, 0)
  return { tick, max(level - back, 0), state[3] }
end

return { fresh = fresh, load = load, save = save, step = step, idle_at = idle_at, undo = undo }
