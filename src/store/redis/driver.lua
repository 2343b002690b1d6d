-- Charges or undoes the counters of one request in one atomic step.
--
-- In front of it stands `twin(name)`, made of the files of src/algorithm. It returns an algorithm's twin, a table of functions
-- that read no clock, no key but that of the state they are given, and write nothing. Moments and lengths are whole
-- microseconds, and every number is whole:
--
--   fresh                                    the state of a counter nobody has used; no function changes a state
--   load(text, window, tick)                 the state of a counter that is a text, nil when it is none of ours
--   read(key, now, window)                   in place of `load` for a counter that is no text: the state, or false; or nil
--                                            and the server's error
--   save(state, key)                         the text, or the commands that write what has changed; what they write every later
--                                            version reads; numbers by string.format('%.0f')
--   step(state, now, hits, back, limit, burst, window, tick, max)
--                                            is admitted, remaining, reset, wait, the state with the hits on it whatever the
--                                            answer; equal to `Count::verdict` and `Count::charge` of the Rust twin, and where
--                                            there is a `max`, the longest wait for a slot, to `Count::slot`. The wait: until
--                                            what is refused fits, and until what is admitted may go on (-1: none)
--   idle_at(state, window, tick)             the first moment at which forgetting the state changes no answer
--   undo(state, now, at, hits, limit, window, tick)
--                                            the state without a charge of `at`, never less than if it had not been asked
--                                            (unless hits were given back in between: it cannot know whose they were)
--
-- KEYS are the counters, each once. ARGV is one packed text. At its start, as `head` says: a moment in the clock of this node,
-- which is the deadline, or to `undo` that of the charges; and the mode. Then the charges, each as `record` says: key (its place in KEYS; 0 for a limit of nothing, which
-- has no counter), algorithm, limit, burst, window, tick, hits taken, hits given back, descriptor, role, records (1: a
-- refused charge is recorded), always (1: the charge is recorded although its request is refused), delay: 0 (none), 1 (a slot) or 2 (one
-- that grows). Behind a 1 stands the longest wait, as `slot` says; behind a 2 the longest wait, the wait for each hit over
-- the limit, and the most hits the limit admits at once, as `growing` says: its limit, or its burst where the algorithm has
-- one, is the largest number then, so that what remains of it tells how many hits stand on the counter.
--
-- each: no charge is taken back. all: these are all charges of the request, and when it is refused only charges with `always` are recorded.
-- take: the request has more charges elsewhere; these are taken back when an enforced one of them refuses, and otherwise
-- the caller undoes them if he must. later: these were decided without this server, each on its own: of hits that were
-- admitted (records: 0) as many are charged as still fit; hits that were refused (records: 1) are charged where nothing
-- remains. lease: of each, as many hits are charged as fit into a quarter of what remains: they are spent later, and an instance
-- that takes them leaves the others most of what is left. Of four hits a second or more that drain, one at least. undo: takes back the hits of charges; there is no deadline.
--
-- The answer is packed too: the time of this node (I8), alone when it is past the deadline and nothing was done, and to
-- `undo`; then for each charge 0 (admitted), 1 (refused), 2 (its key holds nothing of ours, and is left alone; or it was to
-- be admitted beside one that is refused, and there is no memory) or 3 (admitted and not recorded), remaining, reset, wait, and
-- of what was refused the room there was for it (in the mode lease the hits charged, and where nothing remains the wait for one), as `row` says; in the mode take also what would remain and the reset if these charges are taken back.

local head, record, slot, growing = '<I8s', '<I4sI4I4I8I8I8I8I4sBBB', '<I4', '<I4I4I4'
local row, left = '<BI4I8i8I4', '<I4I8'
local pack, unpacked = struct.pack, struct.unpack

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- How long a counter is kept beyond its idle moment, in milliseconds.
local slack = 1000

local KEYS, packed = KEYS, ARGV[1]
local moment, mode, at = unpacked(head, packed)
if mode ~= 'undo' and now > moment then
  return pack('<I8', now)
end

-- The state of a counter; false when the key holds nothing of ours; and an error that is none of the key's.
local function read(charge)
  local algorithm, key, state, failed = charge.algorithm, KEYS[charge.key]
  if algorithm.read then
    state, failed = algorithm.read(key, now, charge.window)
  else
    local text = redis.pcall('GET', key)
    if not text then
      state = algorithm.fresh
    elseif type(text) == 'string' then
      state = algorithm.load(text, charge.window, charge.tick) or false
    else
      failed = text
    end
  end
  if failed and string.sub(failed.err, 1, 9) == 'WRONGTYPE' then
    return false
  end
  return state, failed
end

-- What is written of a counter, and for how many milliseconds it is kept: ten years at most, the longest wait that is told.
local function written(state, charge)
  local algorithm, window = charge.algorithm, charge.window
  -- An undo may come when its counter is idle.
  local idle_at = algorithm.idle_at(state, window, charge.tick)
  local ttl = math.max(math.ceil((idle_at - now) / 1000), 0) + slack
  if ttl > 315360000 * 1000 then ttl = 315360000 * 1000 end
  return algorithm.save(state, KEYS[charge.key]), string.format('%.0f', ttl)
end

-- Decides a charge of so many hits: code, remaining, reset, wait, the room there was, and the state where it changes.
local function decide(charge, state, hits, back)
  if state == false then
    return 2, 0, 0, -1, 0
  end
  local step, max = charge.algorithm.step, charge.max
  local limit, burst, window, tick = charge.limit, charge.burst, charge.window, charge.tick
  local code, is_admitted, remaining, reset, wait, charged, room = 0
  if not charge.growth then
    is_admitted, remaining, reset, wait, charged = step(state, now, hits, back, limit, burst, window, tick, max)
    if not is_admitted then
      if charge.records == 0 or charge.key == 0 then
        return 1, remaining, reset, wait, remaining
      end
      room = remaining
      -- The refused hits stay, so what is left and how long to wait are those of the counter with the hits on it.
      is_admitted, remaining, reset, wait = step(charged, now, hits, back, limit, burst, window, tick, max)
      code = is_admitted and 0 or 1
    end
  else
    is_admitted, remaining, reset, wait, charged = step(state, now, hits, 0, limit, burst, window, tick)
    local used, capacity, steps = 2^32 - 1 - remaining, charge.capacity, math.ceil(max / charge.growth)
    -- What does not even fit so stands higher than this delay lets it, under another limit.
    if not is_admitted or used - hits >= capacity + steps then
      -- More would only prolong the debt.
      local _, _, idle = step(state, now, 0, 0, limit, burst, window, tick)
      return 3, 0, idle, max, 0
    end
    local over = math.max(used - capacity, 0)
    remaining, wait = math.max(capacity - used, 0), over < steps and over * charge.growth or max
  end
  -- A look saves nothing, a limit of nothing has no counter, and giving back creates none.
  if charge.key == 0 or (hits == 0 and (back == 0 or state == charge.algorithm.fresh)) then
    charged = nil
  end
  return code, remaining, reset, wait, room or remaining, charged
end

-- Saves a counter: what the server says where it does not.
local function put(key, made, ttl)
  local saved
  if type(made) == 'string' then
    saved = redis.pcall('SET', KEYS[key], made, 'PX', ttl)
  else
    for index = 1, #made do
      saved = redis.pcall(unpack(made[index]))
      if type(saved) == 'table' then
        break
      end
    end
    if type(saved) ~= 'table' then
      saved = redis.pcall('PEXPIRE', KEYS[key], ttl)
    end
  end
  if type(saved) == 'table' and saved.err then
    -- Before 7.0 the place in the script stands in front.
    saved.err = string.gsub(saved.err, '^@[^ ]+ ?%d*: %-', '')
    return saved
  end
end

-- Whether a server has no memory. It says so to the first write of a script or to none, so nothing is saved then.
local function is_out_of_memory(failed)
  return string.sub(failed.err, 1, 4) == 'OOM '
end

-- The charges. Of each place in KEYS: the state as read, the state as it is to be, and the charge that came first.
local charges, count, twins = {}, 0, {}
local loaded, states, firsts = {}, {}, {}

while at <= #packed do
  local key, name, limit, burst, window, tick, hits, back, descriptor, role, records, always, delay
  key, name, limit, burst, window, tick, hits, back, descriptor, role, records, always, delay, at =
    unpacked(record, packed, at)
  local algorithm = twins[name]
  if not algorithm then
    algorithm = twin(name)
    twins[name] = algorithm
  end
  local charge = {
    key = key, algorithm = algorithm, limit = limit, burst = burst, window = window, tick = tick, hits = hits,
    back = back, descriptor = descriptor, role = role, records = records, always = always,
    drains = name ~= 'fixed_window',
  }
  if delay == 1 then
    charge.max, at = unpacked(slot, packed, at)
  elseif delay == 2 then
    charge.max, charge.growth, charge.capacity, at = unpacked(growing, packed, at)
  end
  count = count + 1
  charges[count] = charge
  if key > 0 and not firsts[key] then
    local state, failed = read(charge)
    if failed then
      return failed
    end
    firsts[key], loaded[key], states[key] = charge, state, state
  end
end

-- The ordinary request: a charge that is alone stays or not by itself, whatever its role, and needs no working table.
if count == 1 and (mode == 'each' or mode == 'all') then
  local charge = charges[1]
  local key, state = charge.key, charge.algorithm.fresh
  if key > 0 then
    state = states[key]
  end
  local code, remaining, reset, wait, room, charged = decide(charge, state, charge.hits, charge.back)
  if charged then
    local made, ttl = written(charged, charge)
    local failed = put(key, made, ttl)
    -- A refusal stands although it cannot be recorded.
    if failed and (code == 0 or not is_out_of_memory(failed)) then
      return failed
    end
  end
  return pack('<I8BI4I8i8I4', now, code, remaining, reset, wait, room)
end

-- Saves what has changed: what the server says where it does not. Everything is made before the first write: a script that
-- fails keeps what it wrote.
local function save()
  local made, ttls = {}, {}
  for key = 1, #KEYS do
    local state = states[key]
    if state ~= loaded[key] then
      made[key], ttls[key] = written(state, firsts[key])
    end
  end
  for key = 1, #KEYS do
    local failed = made[key] and put(key, made[key], ttls[key])
    if failed then
      return failed
    end
  end
end

if mode == 'undo' then
  -- Charges of one counter against one limit are taken back as one: each would move all that came after them.
  local undone, of_key = {}, {}
  for index = 1, count do
    local charge = charges[index]
    local same = of_key[charge.key]
    if same and same.limit == charge.limit then
      same.hits = same.hits + charge.hits
    else
      undone[#undone + 1], of_key[charge.key] = charge, charge
    end
  end
  for index = 1, #undone do
    local charge = undone[index]
    local algorithm, state = charge.algorithm, states[charge.key]
    if state and state ~= algorithm.fresh then
      states[charge.key] = algorithm.undo(state, now, moment, charge.hits, charge.limit, charge.window, charge.tick)
    end
  end
  return save() or pack('<I8', now)
end

-- What a charge's counter is at the moment.
local function state_of(charge)
  if charge.key == 0 then
    return charge.algorithm.fresh
  end
  return states[charge.key]
end

-- Charges the working table: code, remaining, reset, wait, room.
local function take(charge)
  local code, remaining, reset, wait, room, charged = decide(charge, state_of(charge), charge.hits, charge.back)
  if charged then
    states[charge.key] = charged
  end
  return code, remaining, reset, wait, room
end

-- As many of the hits that were decided without this server, or will be, as are charged now.
local function fitting(charge)
  local _, remaining = decide(charge, state_of(charge), 0, 0)
  if mode == 'lease' then
    local most = math.floor(remaining / 4)
    if most == 0 and remaining > 0 and charge.drains and charge.limit * 250000 >= charge.window then
      most = 1
    end
    return math.min(charge.hits, most)
  end
  if charge.records == 1 then
    return remaining == 0 and charge.hits or 0
  end
  return math.min(charge.hits, remaining)
end

for index = 1, count do
  local charge = charges[index]
  if mode == 'later' or mode == 'lease' then
    charge.hits = fitting(charge)
  end
  charge.code, charge.remaining, charge.reset, charge.wait, charge.room = take(charge)
  if mode == 'lease' then
    charge.room = charge.code == 0 and charge.hits or 0
    if charge.room == 0 and charge.remaining == 0 then
      local _
      charge.code, _, _, charge.wait = decide(charge, state_of(charge), 1, 0)
    end
  end
end

-- The same as `is_request_refused` of policy.rs, over the charges that were answered; where the request has more charges
-- elsewhere, its quotas are not decided here.
local function is_request_refused()
  local quota_of, quota_refuses, quota_has_room
  for index = 1, count do
    local charge = charges[index]
    local role, descriptor, refuses = charge.role, charge.descriptor, charge.code == 1
    if charge.code == 2 then
      -- No ballot.
    elseif role == 'enforce' then
      if refuses then
        return true
      end
    elseif role == 'shadow_quota' then
      quota_has_room = true
    elseif role == 'quota' then
      if quota_of == descriptor then
        quota_refuses = quota_refuses or refuses
      else
        quota_has_room = quota_has_room or (quota_of and not quota_refuses)
        quota_of, quota_refuses = descriptor, refuses
      end
    end
  end
  return mode == 'all' and quota_refuses and not quota_has_room
end

local is_refused = (mode == 'all' or mode == 'take') and is_request_refused()
if is_refused or mode == 'take' then
  local taken = states
  states = {}
  for key = 1, #KEYS do
    states[key] = loaded[key]
  end
  for index = 1, count do
    if charges[index].always == 1 then
      take(charges[index])
    end
  end
  for index = 1, count do
    local charge = charges[index]
    local _, remaining, reset = decide(charge, state_of(charge), 0, 0)
    charge.left, charge.left_reset = remaining, reset
    if is_refused and charge.code ~= 2 then
      -- Each keeps its outcome; what is left is what nobody has taken.
      charge.remaining, charge.reset = charge.left, charge.left_reset
    end
  end
  if not is_refused then
    states = taken
  end
end
local failed = save()
if failed then
  local is_any_refused = is_refused
  for index = 1, count do
    is_any_refused = is_any_refused or charges[index].code == 1
  end
  if not is_any_refused or not is_out_of_memory(failed) then
    return failed
  end
  -- Refusals stand although they cannot be recorded. What is admitted is not answered, unless nothing is charged anyway.
  for index = 1, count do
    local charge = charges[index]
    if not is_refused and charge.code ~= 1 then
      charge.code = 2
    end
  end
end

local reply = { pack('<I8', now) }
for index = 1, count do
  local charge = charges[index]
  local answer = pack(row, charge.code, charge.remaining, charge.reset, charge.wait, charge.room)
  if mode == 'take' then
    answer = answer .. pack(left, charge.left, charge.left_reset)
  end
  reply[index + 1] = answer
end
return table.concat(reply)
