-- Charges or undoes the counters of requests, one after the other, each in one atomic step. A failure in one concerns no other.
--
-- In front of it stand the number of `fixed_window` and `twin(number)`, made of the files of src/algorithm. It returns the functions of an algorithm's twin,
-- which read no clock, no key but that of the state they are given, and write nothing. Moments and lengths are whole
-- microseconds, and every number is whole. `...` is a state: up to three values, of which no function changes any. Few tables and
-- closures are made for a charge, because each costs as much as its arithmetic.
--
--   load(text, window, tick)   the state of what is stored, or of false, which is a counter nobody has used; nil when it is none
--                              of ours. Behind the three values, whether an older version wrote it, which kept it less long
--   save(..., key)             the text, which every later version reads
--   step(..., now, hits, back, limit, burst, window, tick, max)
--                              is admitted, remaining, reset, wait, the state with the hits on it whatever the answer; equal to
--                              `Count::verdict` and `Count::charge` of the Rust twin, and where there is a `max`, the longest
--                              wait for a slot, to `Count::slot`. The wait: until what is refused fits, and until what is
--                              admitted may go on (-1: none)
--   kept_until(..., window, tick)
--                              a moment, from that on at which forgetting the state changes no answer; the same for many states that
--                              follow each other, because a new expiry costs Redis as much as a new value
--   undo(..., now, at, hits, limit, window, tick)
--                              the state without a charge of `at`, never less than if it had not been asked (unless hits were
--                              given back in between: it cannot know whose they were)
--
--   read(key, now, window)     only where a counter is no text: what `load` takes, or the server's error. `save` returns the commands
--                              then that write what has changed
--
-- KEYS are the counters, each once for a request. ARGV is one packed text of requests; in front of it stand the counters where they are in
-- several slots of this node of a cluster, which KEYS may not be. At the start of each request, as `head` says: its length;
-- the deadline, in the clock of this node; the mode; the number of its keys; and the number of its charges. Then the charges, each as
-- `record` says: key (its place among the keys of the request; 0 for a limit of
-- nothing, which has no counter), algorithm, limit, burst, window, tick, hits taken, hits given back (to `undo` the moment of the
-- charge), descriptor, role (1: enforce, 2: shadow, 3: quota, 4: shadow_quota), records (1: a refused charge is recorded), delay:
-- 0 (none), 1 (a slot), 2 (one that grows), 3 (none, and behind it the hits that are leased beside it if it is admitted, in the mode
-- each; `room` is what was leased then) or 4 (none; it takes no hits, and is refused while one does not fit), and stays: twice the number of the charge's group (0: none), and 1 more if it is recorded
-- whatever is refused. Behind a 1
-- stands the longest wait, as `slot` says; behind a 2 the longest wait, the wait for each hit over the limit, and the most hits
-- the limit admits at once, as `growing` says: its limit, or its burst where the algorithm has one, is the largest number then,
-- so that what remains of it tells how many hits stand on the counter.
--
-- each: no charge is taken back. group: as each, and where a charge of a group refuses, the others of that group are not recorded. all:
-- these are all charges of the request, and when it is refused only those are recorded that stay, or that have a group, as
-- in group. take: the request, or the group, has more charges elsewhere; these are taken back when an enforced one of them refuses, and
-- otherwise the caller undoes them if he must. later: these were decided without this server, each on its own: of hits that were
-- admitted (records: 0) as many are charged as still fit; hits that were refused (records: 1) are charged where nothing
-- remains. lean: as group, and these are all charges of a request that makes no new counter if it is refused. old: as group, and
-- no new counter is made. lease: of each, as many hits are charged as fit into a quarter of what remains: they are spent later, and an instance
-- that takes them leaves the others most of what is left. Of four hits a second or more that drain, one at least. undo: takes
-- back the hits of charges, each counter and limit once; there is no deadline.
--
-- The answer is packed too: for each request its length, or 2^31 more and the server's error (`UNREAD` and the error, if a counter in ARGV
-- could not be read, so that nothing was written for the request); then the time of this node (I8), alone when
-- it is past the deadline and nothing was done, and to `undo`; then for each charge 0 (admitted), 1 (refused), 2 (its key holds nothing of
-- ours, and is left alone), 3 (admitted and not recorded) or 4 (it would be admitted, and there is no memory to record it),
-- remaining, reset, wait, and of what was refused the room there was for it (in the mode lease the hits charged, and where nothing remains
-- the wait for one), as `row` says; in the mode take also what would remain and the reset if these charges are taken back.

local head, record, slot, growing = '<I4I8sI4I4', '<I4BI4I4I8I8I8I8I4BBBI4', '<I4', '<I4I4I4'
local row, left = '<BI4I8i8I4', '<I4I8'
local pack, unpacked, call = struct.pack, struct.unpack, redis.pcall

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- How long a counter is kept beyond its idle moment, in milliseconds.
local slack = 1000

local KEYS, packed = KEYS, ARGV[#ARGV]
local is_spread = #KEYS == 0 and #ARGV > 1
if is_spread then KEYS = ARGV end
-- The functions of the algorithm of the charge before.
local algorithm, load, save, step, kept_until, undo, read

-- Decides a charge of so many hits: code, remaining, reset, wait, the room there was, and the state with them. `keeps`: a refused charge is
-- recorded.
local function decide(a, b, c, hits, back, limit, burst, window, tick, keeps, max, growth, capacity)
  if growth then
    local is_admitted, remaining, reset, _, x, y, z = step(a, b, c, now, hits, 0, limit, burst, window, tick)
    local used, steps = 2^32 - 1 - remaining, math.ceil(max / growth)
    -- What does not even fit so stands higher than this delay lets it, under another limit.
    if not is_admitted or used - hits >= capacity + steps then
      -- More would only prolong the debt.
      local _, _, idle = step(a, b, c, now, 0, 0, limit, burst, window, tick)
      return 3, 0, idle, max, 0
    end
    local over = math.max(used - capacity, 0)
    remaining = math.max(capacity - used, 0)
    return 0, remaining, reset, over < steps and over * growth or max, remaining, x, y, z
  end
  local is_admitted, remaining, reset, wait, x, y, z = step(a, b, c, now, hits, back, limit, burst, window, tick, max)
  if is_admitted then
    return 0, remaining, reset, wait, remaining, x, y, z
  elseif not keeps then
    return 1, remaining, reset, wait, remaining
  end
  local room = remaining
  -- The refused hits stay, so what is left and how long to wait are those of the counter with the hits on it.
  is_admitted, remaining, reset, wait = step(x, y, z, now, hits, back, limit, burst, window, tick, max)
  return is_admitted and 0 or 1, remaining, reset, wait, room, x, y, z
end

-- For how many milliseconds a counter is kept: ten years at most, the longest wait that is told. An undo may come when it is idle.
local longest = 315360000 * 1000000
local function ttl_until(expiry)
  local ttl = math.min(math.max(math.ceil((expiry - now) / 1000), 0) + slack, longest / 1000)
  return string.format('%.0f', ttl)
end

-- An algorithm that reads keys while it decides raises what the server says where it refuses that: then the request has failed.
local refused
local function guarded(ask)
  return function(...)
    local is_done, a, b, c, d, e = pcall(ask, ...)
    if is_done then
      return a, b, c, d, e
    end
    refused = refused or (type(a) == 'table' and a or { err = a })
    return false, 0, 0, -1
  end
end

-- What the server says where it did not do what it was asked; `is_full`: for it has no memory.
local function failure(saved)
  -- Before 7.0 the place in the script stands in front.
  local said = string.gsub(saved.err, '^@[^ ]+ ?%d*: %-', '')
  return said, string.sub(said, 1, 4) == 'OOM '
end

-- What a server that has no memory said. It says so only to what needs some, and only while nothing was written: after a write that
-- needs none, it takes what needs some, whoever's request that is. So it is asked by the first write of all, and what is new is not written
-- once it has said so.
local full, is_asked

-- Saves a counter, and when it expires; below 0 it expires then already. One that `is_there` is written in its place if there is no memory:
-- that needs none. Returns what the server refuses it with.
local function put(key, saved, expiry, is_there, is_undo)
  if type(saved) == 'string' then
    if not full then
      is_asked = true
      local reply
      if expiry < 0 then
        reply = call('SET', key, saved, 'KEEPTTL')
      else
        reply = call('SET', key, saved, 'PX', ttl_until(expiry))
      end
      if not reply.err then
        return
      elseif not select(2, failure(reply)) then
        return reply
      end
      full = reply
    end
    if not is_there then
      return full
    end
    call('PEXPIRE', key, ttl_until(math.abs(expiry)))
    local reply = call('SET', key, saved, 'KEEPTTL')
    return reply.err and reply
  end
  if not is_asked and saved[1] and saved[1][1] ~= 'ZADD' then
    -- It is there, so nothing is set.
    local reply = call('SET', key, '', 'NX')
    full = type(reply) == 'table' and reply.err and select(2, failure(reply)) and reply
  end
  is_asked = true
  if full and not is_undo then
    -- A log grows.
    return full
  end
  for index = 1, #saved do
    local failed = call(unpack(saved[index]))
    if type(failed) == 'table' then
      if select(2, failure(failed)) then full = failed end
      return failed
    end
  end
  local failed = call('PEXPIRE', key, ttl_until(expiry))
  return type(failed) == 'table' and failed
end

-- The same of a counter that cannot be read. The slot of one in ARGV may be at another node; then the request goes again, unless it has
-- written something.
local function unread(said, is_written)
  local said = failure(said)
  return is_spread and not is_written and 'UNREAD ' .. said or said
end

-- How many hits may be leased of what remains.
local function leasable(remaining, number, limit, window)
  local most = math.floor(remaining / 4)
  if most == 0 and remaining > 0 and number ~= fixed_window and limit * 250000 >= window then
    most = 1
  end
  return most
end

local function is_foreign(text)
  return string.sub(text.err, 1, 9) == 'WRONGTYPE'
end

local base, start, answers = 0, 1
while start <= #packed do
  local length, deadline, mode, keys, count, first = unpacked(head, packed, start)
  local answer
  if mode ~= 'undo' and now > deadline then
    answer = pack('<I4I8', 8, now)
  else
    -- A request that is decided as a whole is saved at its end. Of each place in KEYS: what is stored, what is in its place by now, and
    -- what saves that, and until when. Otherwise each charge is saved at once.
    local is_lean = mode == 'lean' or mode == 'old' or (mode == 'group' and count > 1)
    local is_whole = (mode == 'all' and count > 1) or mode == 'take' or is_lean
    local stored, current, made, expiries, places
    if is_whole then
      stored, current, made, expiries = {}, {}, {}, {}
      places = is_lean and {}
    end
    -- What is answered to each charge; what the server said to one that failed; whether a charge was refused.
    local is_single, reply, failed, is_any_refused, is_written = count == 1 and not is_whole
    if not is_single then
      reply = {}
    end
    -- Of the request: whether an enforced charge refuses it, and the votes of its quotas. The same as `is_request_refused` of policy.rs; where
    -- the request has more charges elsewhere, its quotas are not decided here.
    local is_enforced, quota_of, quota_refuses, quota_has_room
    -- The groups that refuse, each with its number. Where something is refused, or may be: what would be saved, and what is left if
    -- nobody takes.
    local refused_groups, is_refused, made_taken, expiries_taken, looks

    if is_spread and keys > 1 and not is_whole then
      -- Charges are saved one after the other, so all are looked at before.
      for key = 1, keys do
        local text = call('GET', KEYS[base + key])
        if text and text.err and not is_foreign(text) then
          failed = unread(text)
          break
        end
      end
    end

    -- Where charges are decided each on their own, or in groups, those of one descriptor are decided before the next; otherwise all at once.
    local from, from_at = 1, failed and #packed + 1 or first
    while from <= count and not failed do
      local upto, next_at, of = count
      -- What was in the place of what these charges write.
      local before_these = is_lean and {}
      -- 1: the charges are made. Of charges that are refused together, or may be, 2: only those are made that stay even so; 3: what is left
      -- is looked at.
      for pass = 1, 3 do
        local at, index = from_at, from
        while index <= upto do
          local here = at
          local key, number, limit, burst, window, tick, hits, back, descriptor, role, records, delay, stays
          key, number, limit, burst, window, tick, hits, back, descriptor, role, records, delay, stays, at =
            unpacked(record, packed, at)
          if is_lean and pass == 1 then
            if of and descriptor ~= of then
              upto, next_at = index - 1, here
              break
            end
            of = descriptor
          end
          local max, growth, capacity, ask
          if delay == 3 then
            ask, at = unpacked(slot, packed, at)
          elseif delay == 1 then
            max, at = unpacked(slot, packed, at)
          elseif delay == 2 then
            max, growth, capacity, at = unpacked(growing, packed, at)
          end
          local is_due = pass == 1
          if not is_due then
            local is_group_refused = refused_groups and refused_groups[math.floor(stays / 2)]
            if pass == 2 then
              is_due = stays % 2 == 1 or (not is_group_refused and (stays > 0 or not (is_refused or mode == 'take')))
            else
              is_due = is_group_refused or mode == 'take' or (is_refused and not is_lean)
            end
          end
          if is_due then
            if number ~= algorithm then
              algorithm = number
              load, save, step, kept_until, undo, read = twin(number)
              if read then
                save, step, undo = guarded(save), guarded(step), guarded(undo)
              end
            end

            local text
            if is_whole then
              text = current[key]
              if text == nil then
                text = stored[key]
              end
            end
            if text == nil then
              text = false
              if key > 0 then
                if read then
                  text = read(KEYS[base + key], now, window)
                else
                  text = call('GET', KEYS[base + key])
                end
                if text and text.err then
                  if not is_foreign(text) then
                    failed = failed or unread(text, is_written)
                    -- An undo takes back what it can, but not before it goes again.
                    if mode ~= 'undo' or string.sub(failed, 1, 7) == 'UNREAD ' then
                      break
                    end
                  end
                  text = ''
                end
                if is_whole then
                  stored[key] = text
                end
              end
            end
            local a, b, c, is_old = load(text, window, tick)

            local code, remaining, reset, wait, room, x, y, z = 2, 0, 0, -1, 0
            if a and mode == 'undo' then
              if text then
                x, y, z = undo(a, b, c, now, back, hits, limit, window, tick)
                if x == a and y == b and z == c then
                  x = nil
                end
              end
            elseif a then
              local is_decided
              local wanted = mode == 'lease' and hits or ask
              if wanted and hits > 0 and not max then
                -- Most of what is leased fits at once: what is charged then is the same as in two steps.
                code, remaining, reset, wait, room, x, y, z =
                  decide(a, b, c, ask and hits + ask or hits, back, limit, burst, window, tick, false)
                is_decided = code == 0 and remaining >= 3 * wanted
                if is_decided then
                  room = wanted
                end
              end
              if delay == 4 and pass < 3 then
                code, remaining, reset, wait, room = decide(a, b, c, 1, 0, limit, burst, window, tick, false)
                is_decided = code == 1
              end
              if is_decided then
                ask = nil
              elseif pass == 3 then
                hits, back = 0, 0
              elseif mode == 'later' or mode == 'lease' then
                -- As many of the hits that were decided without this server, or will be, as are charged now.
                code, remaining, reset, wait, room =
                  decide(a, b, c, 0, 0, limit, burst, window, tick, false, max, growth, capacity)
                local most = remaining
                if mode == 'lease' then
                  most = leasable(remaining, number, limit, window)
                elseif records == 1 then
                  most = remaining == 0 and hits or 0
                end
                if hits > most then hits = most end
                is_decided = hits == 0
              end
              if not is_decided then
                code, remaining, reset, wait, room, x, y, z =
                  decide(a, b, c, hits, back, limit, burst, window, tick, records == 1 and key > 0, max, growth, capacity)
              end
              if ask and code == 0 then
                -- A look saves nothing, so it leases nothing.
                room = hits > 0 and math.min(ask, leasable(remaining, number, limit, window)) or 0
                if room > 0 then
                  local _
                  _, remaining, reset, _, x, y, z = step(x, y, z, now, room, 0, limit, burst, window, tick)
                end
              elseif mode == 'lease' then
                room = code == 0 and hits or 0
                if room == 0 and remaining == 0 then
                  local _
                  code, _, _, wait = decide(a, b, c, 1, 0, limit, burst, window, tick, false, max, growth, capacity)
                end
              end
              -- A look saves nothing, a limit of nothing has no counter, and giving back creates none.
              if key == 0 or (hits == 0 and (back == 0 or not text)) then
                x = nil
              end
            end

            local saved
            if x then
              saved = save(x, y, z, KEYS[base + key])
            end
            if refused then
              failed, refused = failed or failure(refused), nil
              if mode ~= 'undo' then
                break
              end
              x = nil
            end
            if x then
              local expiry = kept_until(x, y, z, window, tick)
              -- A new expiry costs as much as the rest of the write.
              local before = text and not is_old and not read and kept_until(a, b, c, window, tick)
              if number == fixed_window and remaining == 0 and not growth and mode ~= 'undo' then
                -- Who is refused and goes on finds the counter in the next window too, and needs no memory for it.
                expiry = expiry + window
                if before and a == x and b >= limit then before = before + window end
              end
              local keeps = before and expiry <= before and expiry - now <= longest
              if is_whole then
                local earlier = expiries[key]
                if earlier and earlier > 0 then
                  expiry = math.max(expiry, earlier)
                elseif keeps then
                  expiry = -before
                end
                if before_these and not before_these[key] then
                  before_these[key] = { current[key], made[key], earlier }
                end
                current[key], made[key], expiries[key] = read and x or saved, saved, expiry
              else
                saved, is_written = put(KEYS[base + key], saved, keeps and -before or expiry, text, mode == 'undo'), true
                if saved then
                  local said, is_full = failure(saved)
                  if mode == 'undo' then
                    failed = failed or said
                  elseif not is_full then
                    failed = said
                    break
                  elseif code ~= 1 then
                    -- A refusal stands although it cannot be recorded.
                    code = 4
                  end
                end
              end
            end

            if pass == 1 then
              is_any_refused = is_any_refused or code == 1
              if is_single then
                answer = pack('<I4I8BI4I8i8I4', 33, now, code, remaining, reset, wait, room)
              else
                reply[index] = pack(row, code, remaining, reset, wait, room)
              end
              if is_lean then places[index] = key end
              if is_whole and code ~= 2 then
                local refuses = code == 1
                if refuses and stays > 1 then
                  refused_groups = refused_groups or {}
                  refused_groups[math.floor(stays / 2)] = true
                end
                if role == 1 then
                  is_enforced = is_enforced or refuses
                elseif role == 4 then
                  quota_has_room = true
                elseif role == 3 then
                  if quota_of == descriptor then
                    quota_refuses = quota_refuses or refuses
                  else
                    quota_has_room = quota_has_room or (quota_of and not quota_refuses)
                    quota_of, quota_refuses = descriptor, refuses
                  end
                end
              end
            elseif pass == 3 then
              looks[index] = pack(left, remaining, reset)
            end
          end
          index = index + 1
        end

        if failed then
          break
        elseif pass == 1 then
          is_refused = is_enforced or (mode ~= 'take' and quota_refuses and not quota_has_room)
          if not refused_groups and (is_lean or not is_refused and mode ~= 'take') then
            break
          end
          looks = looks or {}
          if is_lean then
            for key, before in pairs(before_these) do
              current[key], made[key], expiries[key] = before[1], before[2], before[3]
            end
          else
            made_taken, expiries_taken = made, expiries
            current, made, expiries = {}, {}, {}
          end
        end
      end
      from, from_at = upto + 1, next_at
      if is_lean then refused_groups = nil end
    end

    if not failed and looks then
      for index = 1, count do
        local code, remaining, reset, wait, room = unpacked(row, reply[index])
        if looks[index] and code ~= 2 and (is_refused or mode ~= 'take') then
          -- Each keeps its outcome; what is left is what nobody has taken.
          remaining, reset = unpacked(left, looks[index])
          reply[index] = pack(row, code, remaining, reset, wait, room)
        end
        if mode == 'take' then
          reply[index] = reply[index] .. looks[index]
        end
      end
      if mode == 'take' and not is_refused then
        made, expiries = made_taken, expiries_taken
      end
    end

    if not failed and (mode == 'old' or mode == 'lean' and is_refused) then
      for index = 1, count do
        local key = places[index]
        if made[key] and not stored[key] then
          if string.byte(reply[index]) == 0 then
            reply[index] = '\3' .. string.sub(reply[index], 2)
          end
          places[index] = 0
        end
      end
      for key = 1, keys do
        if not stored[key] then made[key] = nil end
      end
    end

    if not failed and is_whole then
      -- What is new, or may grow, is saved first: if there is no memory for it, nothing of what is charged together is written.
      local is_full
      for key = 1, full and 0 or keys do
        local refusal = made[key] and put(KEYS[base + key], made[key], expiries[key])
        if refusal then
          failed, is_full = failure(refusal)
          break
        end
      end
      if full and (is_full or not failed) then
        failed = nil
        local lacks
        for key = 1, keys do
          lacks = lacks or made[key] and not (stored[key] and type(made[key]) == 'string')
        end
        if lacks and not is_refused and not is_lean and not is_any_refused then
          failed = failure(full)
        else
          -- Refusals stand although they cannot be recorded. What is admitted is not answered, unless nothing is charged anyway.
          for index = 1, lacks and not (is_refused and not is_lean) and count or 0 do
            local key = is_lean and places[index]
            local is_lost = not key or made[key] and not (stored[key] and type(made[key]) == 'string')
            if is_lost and string.byte(reply[index]) == 0 then
              reply[index] = '\4' .. string.sub(reply[index], 2)
            end
          end
          for key = 1, lacks and not is_refused and not is_lean and 0 or keys do
            local refusal = made[key] and stored[key] and type(made[key]) == 'string'
              and put(KEYS[base + key], made[key], expiries[key], true)
            if refusal then
              failed = failure(refusal)
              break
            end
          end
        end
      end
    end

    if failed then
      failed = string.sub(failed, 1, 128)
      answer = pack('<I4', 2^31 + #failed) .. failed
    elseif mode == 'undo' then
      answer = pack('<I4I8', 8, now)
    elseif not is_single then
      reply = table.concat(reply)
      answer = pack('<I4I8', 8 + #reply, now) .. reply
    end
  end

  base, start = base + keys, start + length
  if start > #packed and not answers then
    -- The ordinary call: one request.
    return answer
  end
  answers = answers or {}
  answers[#answers + 1] = answer
end
return table.concat(answers)
