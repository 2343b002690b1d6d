-- Charges or undoes the counters of one request in one atomic step.
--
-- In front of it stands `twin(name)`, made of the files of src/algorithm. It returns an algorithm's twin, a table of pure
-- functions that read no clock and no key. Moments and lengths are whole microseconds, and every number is whole:
--
--   fresh                                    the state of a counter nobody has used; no function changes a state
--   load(text, window, tick)                 the state written so, nil when it is none of ours
--   save(state)                              its text, which every later version reads; numbers by string.format('%.0f')
--   step(state, now, hits, back, limit, burst, window, tick)
--                                            is admitted, remaining, reset, retry (-1: none), the state with the hits on
--                                            it whatever the answer; equal to `Count::step` of the Rust twin
--   idle_at(state, window, tick)             the first moment at which forgetting the state changes no answer
--   undo(state, now, at, hits, limit, window, tick)
--                                            the state without a charge of `at`, never less than if it had not been asked
--
-- KEYS are the counters, each once. ARGV: a deadline in the clock of this node, the mode, and for each charge
--
--   each, all, take: key (its place in KEYS; 0 for a limit of nothing, which has no counter), algorithm, limit, burst,
--                    window, tick, hits taken, hits given back, descriptor, role, records (1: a refused charge stays),
--                    kept (1: the charge stays although its request is refused)
--   undo:            key, algorithm, limit, burst, window, tick, hits, the moment of the charge; there is no deadline
--
-- each: no charge is taken back. all: these are all charges of the request, and when it is refused only what is kept stays.
-- take: the request has more charges elsewhere; these are taken back when an enforced one of them refuses, and otherwise
-- the caller undoes them if he must.
--
-- The answer is the time of this node, alone when it is past the deadline and nothing was done; then for each charge
-- 0 (admitted), 1 (refused) or 2 (its key holds nothing of ours, and is left alone; or it was to be admitted beside one that
-- is refused, and there is no memory), remaining, reset, retry; in the mode take also what would remain and the reset if
-- these charges are taken back. To `undo` it is the time.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- How long a counter is kept beyond its idle moment, in milliseconds.
local slack = 1000

-- A text plus 0 is a number, for less than what `tonumber` costs.
local ARGV, KEYS, mode = ARGV, KEYS, ARGV[2]
if mode ~= 'undo' and now > ARGV[1] + 0 then
  return { now }
end
local width = mode == 'undo' and 8 or 12

-- The state of a counter; false when the key holds nothing of ours; and an error that is none of the key's.
local function read(key, algorithm, window, tick)
  local text = redis.pcall('GET', KEYS[key])
  if not text then
    return algorithm.fresh
  elseif type(text) == 'string' then
    return algorithm.load(text, window, tick) or false
  elseif string.sub(text.err, 1, 9) == 'WRONGTYPE' then
    return false
  end
  return nil, text
end

-- What is written of a counter: its text, and for how many milliseconds: ten years at most, the longest wait that is told.
local function written(state, algorithm, window, tick)
  -- An undo may come when its counter is idle.
  local ttl = math.max(math.ceil((algorithm.idle_at(state, window, tick) - now) / 1000), 0) + slack
  if ttl > 315360000 * 1000 then ttl = 315360000 * 1000 end
  return algorithm.save(state), string.format('%.0f', ttl)
end

-- Decides a charge whose arguments stand behind `at`: code, remaining, reset, retry, and the state where it changes.
local function decide(at, key, state, algorithm, limit, burst, window, tick)
  if state == false then
    return 2, 0, 0, -1
  end
  local hits, back = ARGV[at + 7] + 0, ARGV[at + 8] + 0
  local step = algorithm.step
  local is_admitted, remaining, reset, retry, charged = step(state, now, hits, back, limit, burst, window, tick)
  if not is_admitted then
    if ARGV[at + 11] ~= '1' or key == 0 then
      return 1, remaining, reset, retry
    end
    -- The refused hits stay, so what is left and how long to wait are those of the counter with the hits on it.
    is_admitted, remaining, reset, retry = step(charged, now, hits, back, limit, burst, window, tick)
  end
  -- A look saves nothing, a limit of nothing has no counter, and giving back creates none.
  if key == 0 or (hits == 0 and (back == 0 or state == algorithm.fresh)) then
    charged = nil
  end
  return is_admitted and 0 or 1, remaining, reset, retry, charged
end

-- Saves a counter: what the server says where it does not.
local function put(key, text, ttl)
  local saved = redis.pcall('SET', KEYS[key], text, 'PX', ttl)
  if saved.err then
    return saved
  end
end

-- Whether a server has no memory. It says so to the first write of a script or to none, so nothing is saved then.
local function is_out_of_memory(failed)
  return string.sub(failed.err, 1, 4) == 'OOM '
end

-- The ordinary request: a charge that is alone stays or not by itself, whatever its role, and needs no working table.
if #ARGV == 14 and mode ~= 'take' then
  local key, algorithm, window, tick = ARGV[3] + 0, twin(ARGV[4]), ARGV[7] + 0, ARGV[8] + 0
  local state, failed = algorithm.fresh, nil
  if key > 0 then
    state, failed = read(key, algorithm, window, tick)
    if failed then
      return failed
    end
  end
  local code, remaining, reset, retry, charged =
    decide(2, key, state, algorithm, ARGV[5] + 0, ARGV[6] + 0, window, tick)
  if charged then
    local text, ttl = written(charged, algorithm, window, tick)
    failed = put(key, text, ttl)
    -- A refusal stands although it cannot be recorded.
    if failed and (code == 0 or not is_out_of_memory(failed)) then
      return failed
    end
  end
  return { now, code, remaining, reset, retry }
end

-- Of each charge: its place in KEYS, its twin, limit, burst, window, tick. Of each place: the state as read, the state as
-- it is to be, and which charge came first.
local places, algorithms, limits, bursts, windows, ticks = {}, {}, {}, {}, {}, {}
local loaded, states, firsts = {}, {}, {}
local twins, count = {}, 0

for at = 2, #ARGV - 1, width do
  count = count + 1
  local key, name = ARGV[at + 1] + 0, ARGV[at + 2]
  local algorithm = twins[name]
  if not algorithm then
    algorithm = twin(name)
    twins[name] = algorithm
  end
  local window, tick = ARGV[at + 5] + 0, ARGV[at + 6] + 0
  places[count], algorithms[count] = key, algorithm
  limits[count], bursts[count], windows[count], ticks[count] = ARGV[at + 3] + 0, ARGV[at + 4] + 0, window, tick
  if key > 0 and not firsts[key] then
    local state, failed = read(key, algorithm, window, tick)
    if failed then
      return failed
    end
    firsts[key], loaded[key], states[key] = count, state, state
  end
end

-- Saves what has changed: what the server says where it does not. Everything is made before the first write: a script that
-- fails keeps what it wrote.
local function save()
  local texts, ttls = {}, {}
  for key = 1, #KEYS do
    local state = states[key]
    if state ~= loaded[key] then
      local index = firsts[key]
      texts[key], ttls[key] = written(state, algorithms[index], windows[index], ticks[index])
    end
  end
  for key = 1, #KEYS do
    local failed = texts[key] and put(key, texts[key], ttls[key])
    if failed then
      return failed
    end
  end
end

if mode == 'undo' then
  for index = 1, count do
    local key, algorithm, at = places[index], algorithms[index], 2 + (index - 1) * width
    local state = states[key]
    if state and state ~= algorithm.fresh then
      local hits, moment = ARGV[at + 7] + 0, ARGV[at + 8] + 0
      states[key] = algorithm.undo(state, now, moment, hits, limits[index], windows[index], ticks[index])
    end
  end
  return save() or { now }
end

-- Charges the working table: code, remaining, reset, retry.
local function charge(index)
  local key, algorithm = places[index], algorithms[index]
  local state = algorithm.fresh
  if key > 0 then
    state = states[key]
  end
  local code, remaining, reset, retry, charged = decide(
    2 + (index - 1) * width, key, state, algorithm, limits[index], bursts[index], windows[index], ticks[index])
  if charged then
    states[key] = charged
  end
  return code, remaining, reset, retry
end

local codes, remainings, resets, retries = {}, {}, {}, {}
for index = 1, count do
  codes[index], remainings[index], resets[index], retries[index] = charge(index)
end

-- The same as `is_request_refused` of policy.rs, over the charges that were answered; where the request has more charges
-- elsewhere, its quotas are not decided here.
local function is_request_refused()
  local quota_of, quota_refuses, quota_has_room
  for index = 1, count do
    local at = 2 + (index - 1) * width
    local role, descriptor, refuses = ARGV[at + 10], ARGV[at + 9], codes[index] == 1
    if codes[index] == 2 then
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

-- What a look says of a charge's counter: remaining, reset.
local function look(index)
  local key, algorithm = places[index], algorithms[index]
  local state = algorithm.fresh
  if key > 0 then
    state = states[key]
  end
  if not state then
    return 0, 0
  end
  local _, remaining, reset =
    algorithm.step(state, now, 0, 0, limits[index], bursts[index], windows[index], ticks[index])
  return remaining, reset
end

local is_refused = mode ~= 'each' and is_request_refused()
local lefts, left_resets = {}, {}
if is_refused or mode == 'take' then
  local taken = states
  states = {}
  for key = 1, #KEYS do
    states[key] = loaded[key]
  end
  for index = 1, count do
    if ARGV[2 + (index - 1) * width + 12] == '1' then
      charge(index)
    end
  end
  for index = 1, count do
    lefts[index], left_resets[index] = look(index)
    if is_refused and codes[index] ~= 2 then
      -- Each keeps its outcome; what is left is what nobody has taken.
      remainings[index] = lefts[index]
      if codes[index] == 0 then
        resets[index] = left_resets[index]
      end
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
    is_any_refused = is_any_refused or codes[index] == 1
  end
  if not is_any_refused or not is_out_of_memory(failed) then
    return failed
  end
  -- Refusals stand although they cannot be recorded. What is admitted is not answered, unless nothing is charged anyway.
  for index = 1, count do
    if not is_refused and codes[index] == 0 then
      codes[index], remainings[index], resets[index], retries[index] = 2, 0, 0, -1
    end
  end
end

local reply, size = { now }, 1
for index = 1, count do
  reply[size + 1], reply[size + 2], reply[size + 3], reply[size + 4] =
    codes[index], remainings[index], resets[index], retries[index]
  size = size + 4
  if mode == 'take' then
    reply[size + 1], reply[size + 2] = lefts[index], left_resets[index]
    size = size + 2
  end
end
return reply
