-- The twin of meter.rs, which says what it counts. A state is tick, level and slowest, packed:
-- the slowest is the smallest limit it was charged against, under which it is idle last.
-- Above 2^53 a number is no longer exact; 2^52 is the most that is ever counted (algorithm.rs); 2^32 - 1 is the largest
-- limit, and whatever is charged first is no faster.
--
-- `ahead(level, wanted, room)` is `Slots::ahead` of the Rust twin: what has to drain before it is the turn of a charge, and
-- before there is a slot for it at all; 0 or less is nothing. Without it nobody waits.

local ahead = ...

local function load(text, _, tick_us)
  if not text then
    return 0, 0, 2^32 - 1
  end
  local tick, level, slowest
  if #text == 24 then
    tick, level, slowest = struct.unpack('<I8I8I8', text)
  end
  local is_old = not tick or tick > 2^53
  if is_old then
    tick, level, slowest = string.match(text, '^(%d+) (%d+) (%d+)$')
  end
  if tick then
    tick, level, slowest = tick + 0, level + 0, slowest + 0
    if tick * tick_us <= 2^53 and level <= 2^52 and slowest >= 1 and slowest < 2^32 then
      return tick, level, slowest, is_old
    end
  end
end

local function save(tick, level, slowest)
  return struct.pack('<I8I8I8', tick, level, slowest)
end

-- The tick of a moment, and the level then. What drains may be above 2^53 and no longer exact, but then nothing is left.
local function drained(tick, level, now, limit, tick_us)
  local reached = (now - now % tick_us) / tick_us
  -- A clock that steps back waits where it was: nothing drains twice.
  if reached <= tick then
    return tick, level
  end
  level = level - (reached - tick) * limit
  return reached, level > 0 and level or 0
end

-- How long from `now` until so many grains have drained since `tick`: ten years at most, as in meter.rs. The ticks are cut
-- first, so that no product leaves 2^53; by the longest delay later, 300 s, for `now` may be the moment after one.
local longest = 315360000 * 1000000
local function wait(grains, now, tick, limit, tick_us)
  if limit == 0 then
    return math.max(tick * tick_us - now, 0)
  end
  local ticks, most = grains / limit, (longest + 300 * 1000000) / tick_us + 1
  ticks = ticks + -ticks % 1
  if ticks > most then ticks = most end
  local left = (tick + ticks) * tick_us - now
  if left < 0 then left = 0 elseif left > longest then left = longest end
  return left
end

local function step(tick, level, slowest, now, hits, back, limit, burst, length, tick_us, max)
  local grains = length / tick_us
  tick, level = drained(tick, level, now, limit, tick_us)
  local room, wanted = burst * grains, level + hits * grains
  -- Hits given back are taken back whatever is used.
  local is_admitted = wanted <= room or back > 0
  local reset, waits = 0, -1
  if max then
    local of_turn, of_slot = ahead(level, wanted, room)
    waits = of_turn > 0 and wait(of_turn, now, tick, limit, tick_us) or 0
    is_admitted = of_slot <= 0 and waits <= max
    if not is_admitted then
      local idle_turn, idle_slot = ahead(0, hits * grains, room)
      if idle_slot > 0 or math.ceil(idle_turn / limit) > math.ceil(max / tick_us) then
        waits = -1
      else
        -- Its wait shrinks as time goes on, so it fits when there is a slot whose wait has shrunk to the longest.
        waits = of_turn > 0 and wait(of_turn, now + max, tick, limit, tick_us) or 0
        waits = math.max(waits, of_slot > 0 and wait(of_slot, now, tick, limit, tick_us) or 0)
      end
    end
  elseif not is_admitted and hits <= burst and limit > 0 then
    waits = wait(wanted - room, now, tick, limit, tick_us)
  end
  local charged = wanted - back * grains
  if charged < 0 then charged = 0 elseif charged > 2^52 then charged = 2^52 end
  local left = is_admitted and charged or level
  if left > 0 then
    reset = wait(left, now, tick, limit, tick_us)
  end
  local free = room - left
  if free < 0 then free = 0 end
  if limit < slowest then slowest = limit end
  return is_admitted, (free - free % grains) / grains, reset, waits, tick, charged, slowest
end

-- The idle moment, rounded up: to a whole second, or where the level takes longer to drain, to a power of two near that time.
local function kept_until(tick, level, slowest, _, tick_us)
  local ticks, grain = level / slowest, 1000000
  local idle = (tick + ticks - ticks % 1 + 1) * tick_us
  if ticks * tick_us > grain then
    local _, power = math.frexp(ticks * tick_us)
    grain = 2^power
  end
  return idle + -idle % grain
end

-- What the charge added, less what has drained since: that much at least still stands. A counter that was lost with the
-- charge may begin anew before it.
local function undo(tick, level, slowest, now, at, hits, limit, length, tick_us)
  tick, level = drained(tick, level, now, limit, tick_us)
  local since = math.max(tick - math.floor(at / tick_us), 0)
  local back = math.max(hits * (length / tick_us) - since * limit, 0)
  return tick, math.max(level - back, 0), slowest
end

return load, save, step, kept_until, undo
