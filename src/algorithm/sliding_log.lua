-- The twin of sliding_log.rs, which says what it counts. A counter is a sorted set with one member for each moment at which
-- hits came: its score is the moment, and the member is "<start> <hits>", how many hits came before them and how many they
-- are. Starts run round at 2^52, and at most 2^48 hits are ever counted, so any two entries tell how many hits lie between
-- them: a charge reads only the ends of the log, however long it is.
--
-- A state has, where something is stored, the key and the latest moment that is a window's length old; the moment of the
-- latest hits (`time`); the start of the oldest entry that counts, its moment and its hits; where the latest ends (`upto`); the
-- start and the hits of the latest that is stored; and how it differs from what is stored: so many of the latest entries are
-- gone, or all of them (`is_void`), and those of `tail` come in their place.

local turn, most_hits, most_entries = 2^52, 2^48, 10000
-- An undo that would have to move more entries than these leaves the log as it is, which counts too much and never too little.
local most_moved = 1000
-- So many entries that no longer count go with each charge, so that none has to throw away a whole log.
local most_dropped = 100
local fresh = { time = 0, start = 0, upto = 0, oldest_hits = 0, gone = 0, tail = {} }

-- Asks the server. What it refuses is raised: the driver takes it for this request alone.
local function call(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    error(reply)
  end
  return reply
end

local function plain(number)
  return string.format('%.0f', number)
end

-- The start and the hits of a member, nil when it is none of ours.
local function parse(member)
  local start, hits = string.match(member, '^(%d+) (%d+)$')
  if start then
    start, hits = start + 0, hits + 0
    if start < turn and hits >= 1 and hits <= most_hits then
      return start, hits
    end
  end
end

local function read(key, now, window)
  local newest = redis.pcall('ZRANGE', key, -1, -1, 'WITHSCORES')
  if newest.err then
    return newest
  elseif not newest[1] then
    return false
  end
  local start, hits = parse(newest[1])
  local time = newest[2] + 0
  if not start or time % 1 ~= 0 or time < 0 or time > 2^53 then
    return ''
  end
  -- A clock that steps back waits at the last moment it had reached.
  local old = plain(math.max(now, time) - window)
  local oldest = redis.pcall('ZRANGEBYSCORE', key, '(' .. old, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if oldest.err then
    return oldest
  elseif not oldest[1] then
    return { key = key, old = old, is_void = true, time = 0, start = 0, upto = 0, oldest_hits = 0, gone = 0, tail = {} }
  end
  local first, oldest_hits = parse(oldest[1])
  return first and {
    key = key, old = old, time = time, start = first, upto = (start + hits) % turn, oldest = oldest[2] + 0,
    oldest_hits = oldest_hits, newest = start, newest_hits = hits, gone = 0, tail = {},
  } or ''
end

local function load(state)
  return not state and fresh or state ~= '' and state or nil
end

-- A copy of a state, to be changed before anybody sees it.
local function copy(state)
  local new, tail = {}, {}
  for name, value in pairs(state) do
    new[name] = value
  end
  for index, entry in ipairs(state.tail) do
    tail[index] = entry
  end
  new.tail = tail
  return new
end

local function with_more(state, hits, clock)
  local new = copy(state)
  local tail = new.tail
  local last = tail[#tail]
  -- Of one moment there is one member: those of equal scores stand in the order of their letters. Where stored ones are gone,
  -- the latest that is left is in the tail.
  if new.newest and new.gone == 0 and not last and new.time == clock then
    last = { start = new.newest, hits = new.newest_hits }
    new.gone, tail[1] = 1, last
  end
  if last and new.time == clock then
    tail[#tail] = { time = clock, start = last.start, hits = last.hits + hits }
  else
    tail[#tail + 1] = { time = clock, start = new.upto, hits = hits }
  end
  new.time, new.upto = clock, (new.upto + hits) % turn
  return new
end

-- The entry that has the so manieth hit, from the oldest, which is the first: that of `tail` with its place there, or a stored
-- one with how many of the stored ones come after it.
local function entry_of(state, hit)
  for index = #state.tail, 1, -1 do
    local entry = state.tail[index]
    if (entry.start - state.start) % turn < hit then
      return entry, index
    end
  end
  local low = call('ZCOUNT', state.key, '-inf', state.old)
  local all = call('ZCARD', state.key)
  -- The entries that are gone end behind the hit, so the search passes over them.
  local high = all - 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local start, hits = parse(call('ZRANGE', state.key, middle, middle)[1])
    if start and (start - state.start) % turn + hits < hit then
      low = middle + 1
    else
      high = middle
    end
  end
  local found = call('ZRANGE', state.key, low, low, 'WITHSCORES')
  local start, hits = parse(found[1])
  return { time = found[2] + 0, start = start or state.start, hits = hits or 0 }, nil, all - 1 - low
end

-- The moment of the so manieth hit.
local function moment_of(state, hit)
  if hit <= state.oldest_hits then
    return state.oldest
  end
  return entry_of(state, hit).time
end

-- The latest go, and so many are left.
local function with_only(state, left)
  local new = copy(state)
  new.upto, new.oldest_hits = (new.start + left) % turn, math.min(new.oldest_hits, left)
  if left == 0 then
    new.time, new.newest, new.is_void, new.tail = 0, nil, true, {}
    return new
  end
  local entry, place, after = entry_of(state, left)
  if not place then
    new.gone, new.tail, place = after + 1, {}, 1
  end
  for index = #new.tail, place, -1 do
    new.tail[index] = nil
  end
  new.tail[place] = { time = entry.time, start = entry.start, hits = (new.upto - entry.start) % turn }
  new.time = entry.time
  return new
end

local function step(state, _, _, now, hits, back, limit, _, window)
  local used, charged = (state.upto - state.start) % turn, state
  -- Hits given back are taken back whatever is used.
  local is_admitted = used + hits <= limit or back > 0
  local more = math.min(hits, most_hits - used)
  if more > 0 then
    charged = with_more(state, more, math.max(now, state.time))
  elseif back > 0 then
    charged = with_only(state, math.max(used - back, 0))
  end
  local left, retry = charged, -1
  if not is_admitted then
    left = state
    if hits <= limit then
      -- When as many as are too many, the oldest, have become old.
      retry = moment_of(state, used + hits - limit) + window - now
    end
  end
  used = (left.upto - left.start) % turn
  return is_admitted, math.max(limit - used, 0), used > 0 and left.time + window - now or 0, retry, charged
end

local function kept_until(state, _, _, window)
  return state.time + window
end

-- The commands that store what has changed, all of them known before the first is run.
local function save(state, _, _, key)
  local commands, tail = {}, state.tail
  if state.is_void then
    -- Its memory is freed beside what the server does next.
    commands[1] = { 'UNLINK', key }
  elseif state.gone > 0 then
    commands[1] = { 'ZREMRANGEBYRANK', key, -state.gone, -1 }
  end
  for index = 1, #tail do
    local entry = tail[index]
    table.insert(commands, { 'ZADD', key, plain(entry.time), plain(entry.start) .. ' ' .. plain(entry.hits) })
  end
  if not state.old or state.is_void then
    return commands
  end
  local old = call('ZCOUNT', key, '-inf', state.old)
  if old > 0 then
    table.insert(commands, { 'ZREMRANGEBYRANK', key, 0, math.min(old, most_dropped) - 1 })
  -- Each entry has a hit, so the limit is used up until the oldest of them is old; the hits of the one that goes become old
  -- with those of the next. Where some are old, a charge drops one at least and adds one at most, so the log does not grow.
  elseif (state.upto - state.start) % turn > most_entries
    and call('ZCARD', key) - state.gone + #tail > most_entries then
    local two = call('ZRANGE', key, 0, 1, 'WITHSCORES')
    local start, hits = parse(two[1])
    local _, more = parse(two[3])
    if more then
      table.insert(commands, { 'ZREMRANGEBYRANK', key, 0, 1 })
      table.insert(commands, { 'ZADD', key, two[4], plain(start) .. ' ' .. plain(hits + more) })
    end
  end
  return commands
end

-- The hits of that moment, as far as they are still there: what came after them moves up.
local function undo(state, _, _, now, at, hits, _, window)
  if at <= math.max(now, state.time) - window then
    return state
  end
  local new = copy(state)
  local tail = new.tail
  if new.gone == 0 then
    local found = call('ZRANGEBYSCORE', state.key, plain(at), '+inf', 'WITHSCORES', 'LIMIT', 0, most_moved + 1)
    new.gone = #found / 2
    for index = 1, new.gone do
      local start, own = parse(found[2 * index - 1])
      if not start then
        return state
      end
      tail[index] = { time = found[2 * index] + 0, start = start, hits = own }
    end
  end
  if not tail[1] or tail[1].time ~= at or #tail > most_moved then
    return state
  end
  local back = math.min(hits, tail[1].hits)
  for index, entry in ipairs(tail) do
    tail[index] = { time = entry.time, start = (entry.start - back) % turn, hits = entry.hits }
  end
  tail[1].start, tail[1].hits = (tail[1].start + back) % turn, tail[1].hits - back
  if tail[1].hits == 0 then
    table.remove(tail, 1)
  end
  new.upto = (new.upto - back) % turn
  return new
end

return load, save, step, kept_until, undo, read
