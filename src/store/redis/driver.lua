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
-- 0 (admitted), 1 (refused) or 2 (its key holds nothing of ours, and is left alone), remaining, reset, retry; in the mode
-- take also what would remain and the reset if these charges are taken back. To `undo` it is the time.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- How long a counter is kept beyond its idle moment, in milliseconds.
local slack = 1000
-- The longest a counter is kept, in milliseconds: ten years, the longest wait that is told.
local longest_kept = 315360000000

local mode = ARGV[2]
if mode ~= 'undo' and now > tonumber(ARGV[1]) then
  return { now }
end
local width = mode == 'undo' and 8 or 12

-- The twins in use, and by place in KEYS: the state as read (false: none of ours), the state as it is to be, and which
-- charge came first.
local twins, loaded, states, firsts = {}, {}, {}, {}

for at = 2, #ARGV - 1, width do
  local key, name = tonumber(ARGV[at + 1]), ARGV[at + 2]
  local algorithm = twins[name]
  if not algorithm then
    algorithm = twin(name)
    twins[name] = algorithm
  end
  if key > 0 and not firsts[key] then
    firsts[key] = at
    local text, state = redis.pcall('GET', KEYS[key]), false
    if not text then
      state = algorithm.fresh
    elseif type(text) == 'string' then
      state = algorithm.load(text, tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])) or false
    elseif string.sub(text.err, 1, 9) ~= 'WRONGTYPE' then
      return text
    end
    loaded[key], states[key] = state, state
  end
end

local function quota(at)
  return tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
end

-- Saves what has changed. Everything is made before the first write: a script that fails keeps what it wrote.
local function save()
  local writes = {}
  for key = 1, #KEYS do
    local state = states[key]
    if state ~= loaded[key] then
      local at = firsts[key]
      local _, _, window, tick = quota(at)
      local algorithm = twins[ARGV[at + 2]]
      local ttl = math.ceil((algorithm.idle_at(state, window, tick) - now) / 1000) + slack
      local count = #writes
      writes[count + 1] = KEYS[key]
      writes[count + 2] = algorithm.save(state)
      writes[count + 3] = string.format('%.0f', math.min(ttl, longest_kept))
    end
  end
  for write = 1, #writes, 3 do
    redis.call('SET', writes[write], writes[write + 1], 'PX', writes[write + 2])
  end
end

if mode == 'undo' then
  for at = 2, #ARGV - 1, width do
    local key = tonumber(ARGV[at + 1])
    local state, algorithm = states[key], twins[ARGV[at + 2]]
    if state and state ~= algorithm.fresh then
      local limit, _, window, tick = quota(at)
      states[key] = algorithm.undo(state, now, tonumber(ARGV[at + 8]), tonumber(ARGV[at + 7]), limit, window, tick)
    end
  end
  save()
  return { now }
end

-- Decides one charge and leaves behind what it leaves behind: code, remaining, reset, retry.
local function charge(at)
  local key, algorithm = tonumber(ARGV[at + 1]), twins[ARGV[at + 2]]
  local fresh, state = algorithm.fresh, states[key]
  if key == 0 then
    state = fresh
  elseif not state then
    return 2, 0, 0, -1
  end
  local limit, burst, window, tick = quota(at)
  local hits, back = tonumber(ARGV[at + 7]), tonumber(ARGV[at + 8])
  local is_admitted, remaining, reset, retry, charged =
    algorithm.step(state, now, hits, back, limit, burst, window, tick)
  if not is_admitted then
    if ARGV[at + 11] ~= '1' or key == 0 then
      return 1, remaining, reset, retry
    end
    -- The refused hits stay, so what is left and how long to wait are those of the counter with the hits on it.
    is_admitted, remaining, reset, retry = algorithm.step(charged, now, hits, back, limit, burst, window, tick)
  end
  -- A look saves nothing, a limit of nothing has no counter, and giving back creates none.
  if key > 0 and (hits > 0 or (back > 0 and state ~= fresh)) then
    states[key] = charged
  end
  return is_admitted and 0 or 1, remaining, reset, retry
end

local reply = { now }

if mode == 'each' then
  local count = 1
  for at = 2, #ARGV - 1, width do
    reply[count + 1], reply[count + 2], reply[count + 3], reply[count + 4] = charge(at)
    count = count + 4
  end
  save()
  return reply
end

-- The same as `is_request_refused` of policy.rs, over the charges that were answered; where the request has more charges
-- elsewhere, its quotas are not decided here.
local function is_request_refused(codes)
  local quota_of, quota_refuses, quota_has_room
  for index = 1, #codes do
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
local function look(at)
  local key, algorithm = tonumber(ARGV[at + 1]), twins[ARGV[at + 2]]
  local state = key == 0 and algorithm.fresh or states[key]
  if not state then
    return 0, 0
  end
  local _, remaining, reset = algorithm.step(state, now, 0, 0, quota(at))
  return remaining, reset
end

local codes, remainings, resets, retries = {}, {}, {}, {}
for index = 1, (#ARGV - 2) / width do
  codes[index], remainings[index], resets[index], retries[index] = charge(2 + (index - 1) * width)
end
local is_refused = is_request_refused(codes)
local taken = states
local lefts, left_resets = {}, {}
if is_refused or mode == 'take' then
  states = {}
  for key = 1, #KEYS do
    states[key] = loaded[key]
  end
  for index = 1, #codes do
    local at = 2 + (index - 1) * width
    if ARGV[at + 12] == '1' then
      charge(at)
    end
  end
  for index = 1, #codes do
    lefts[index], left_resets[index] = look(2 + (index - 1) * width)
    if is_refused and codes[index] ~= 2 then
      -- Each keeps its outcome; what is left is what nobody has taken.
      remainings[index] = lefts[index]
      if codes[index] == 0 then
        resets[index] = left_resets[index]
      end
    end
  end
end
if not is_refused then
  states = taken
end
save()

for index = 1, #codes do
  local count = #reply
  reply[count + 1], reply[count + 2], reply[count + 3], reply[count + 4] =
    codes[index], remainings[index], resets[index], retries[index]
  if mode == 'take' then
    reply[count + 5], reply[count + 6] = lefts[index], left_resets[index]
  end
end
return reply
