"""Scripts that RedisJournal runs inside the server. Each is executed atomically.

Keys, all in one hash slot: ``log``, a stream whose entry at position p has the id ``p+1-0`` and holds the record
followed by its hash (see :class:`hpstage.store.cursor.Cursor`); ``about``, a hash with the store's format, id, last
token, clock, and whether the log was ever appended to; ``handles``, a hash from open handles to their last append;
``leases``, a hash from names to ``token expiry owner``; ``snapshot``, a hash with the id of a snapshot, the number of
its parts, and each part by its index.

For Redis 6.2: no functions, and no write command before one that a server without memory refuses, since only the first
write of a script is refused when memory is short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from hpstage.store.cursor import HASH_LENGTH

FORMAT = 3


class Script(NamedTuple):
    source: bytes
    digest: str
    """The name that Redis uses for the script; not security-relevant."""


def _script(source: str) -> Script:
    content = (_KEYS + source).encode()
    return Script(content, hashlib.sha1(content, usedforsecurity=False).hexdigest())


def _in_store(*parts: str) -> Callable[[str], Script]:
    """Return a function that makes a script from its source. The script checks that the store is the same, and runs
    these parts before the source."""
    return lambda source: _script("".join((_SAME_STORE, *parts, source)))


_KEYS = """
local log, about, handles, leases, snapshot = unpack(KEYS)
"""

# In all scripts below, ARGV[1] is the id that the store had when the handle was opened.
_SAME_STORE = """
if redis.call('HGET', about, 'id') ~= ARGV[1] then return {'gone'} end
"""

# Microseconds that never go back. If the server's clock is set back, this clock stands still, and then runs with the
# new offset; otherwise the leases of dead owners would last an hour longer. A clock set ahead lets leases expire early,
# which costs no owner its work unless another takes the lease.
_CLOCK = """
local function read_clock()
  local time = redis.call('TIME')
  local known = redis.call('HMGET', about, 'offset', 'clock')
  local offset, last = tonumber(known[1] or 0), tonumber(known[2] or 0)
  local now = time[1] * 1000000 + time[2] + offset
  if now < last then return last, offset + last - now end
  return now, offset
end
local function keep_clock(now, offset)
  redis.call('HSET', about, 'clock', string.format('%.0f', now), 'offset', string.format('%.0f', offset))
end
"""

# Stored with the log rather than separately, so that whatever rolls back the log rolls back its hashes, too.
_HASHES = f"""
local function hash_of(position)
  if position == 0 then return '' end
  local id = string.format('%.0f-0', position)
  local entry = redis.call('XRANGE', log, id, id)[1]
  return entry and string.sub(entry[2][2], -{HASH_LENGTH})
end
"""

# The log is complete if the number of the last entry ever added equals its length. XTRIM, XDEL and DEL change that.
_LENGTH = """
local length = 0
if redis.call('EXISTS', log) == 1 then
  local info, about_log = redis.call('XINFO', 'STREAM', log), {}
  for i = 1, #info, 2 do about_log[info[i]] = info[i + 1] end
  length = about_log['length']
  if about_log['last-generated-id'] ~= string.format('%.0f-0', length) then return {'trimmed'} end
elseif redis.call('HEXISTS', about, 'begun') == 1 then
  return {'trimmed'}
end
"""

_LEASES = """
local function lease(name)
  local held = redis.call('HGET', leases, name)
  if not held then return nil end
  local token, expires, owner = string.match(held, '^(%d+) (%d+) (.*)$')
  return token, tonumber(expires), owner
end
local function keep_lease(name, token, expires, owner)
  -- Not by the format: its %s ends at a zero byte.
  redis.call('HSET', leases, name, token .. string.format(' %.0f ', expires) .. owner)
end
"""

# ARGV: format, a new id. Returns the format and id of the store.
OPEN = _script("""
for _, key in ipairs({about, handles, leases, snapshot}) do
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= 'hash' then return {'foreign', key, kind} end
end
local kind = redis.call('TYPE', log).ok
if kind ~= 'none' and kind ~= 'stream' then return {'foreign', log, kind} end
local known = redis.call('HMGET', about, 'format', 'id')
if not known[1] or not known[2] then
  for _, key in ipairs(KEYS) do
    if redis.call('EXISTS', key) == 1 then return {'foreign', key, redis.call('TYPE', key).ok} end
  end
  redis.call('HSET', about, 'format', ARGV[1], 'id', ARGV[2], 'token', '0', 'clock', '0', 'offset', '0')
  known = {ARGV[1], ARGV[2]}
end
return {'open', known[1], known[2]}
""")

LENGTH = _in_store(_LENGTH)("""
return {'at', length}
""")

# ARGV: id, position. Returns the length of the log and the hash of its records up to the position, '' if it is shorter.
HASH = _in_store(_LENGTH, _HASHES)("""
return {'at', length, hash_of(tonumber(ARGV[2])) or ''}
""")

# ARGV: id, handle, number of this append, position expected or '', hash expected, number of fences, then name and token
# of each, then the records.
#
# Returns the position. A handle makes one append at a time, numbered from 1, and its last one is remembered. An append
# that is repeated because the reply was lost is answered but not applied. An append that arrives late, after the next
# (its sender gave up), is not applied either.
APPEND = _in_store(_LENGTH, _HASHES, _LEASES)(f"""
local last = redis.call('HGET', handles, ARGV[2])
if last then
  local number, position = string.match(last, '^(%d+) (%d+)$')
  if tonumber(number) == tonumber(ARGV[3]) then return {{'at', tonumber(position)}} end
  if tonumber(number) > tonumber(ARGV[3]) then return {{'late'}} end
end
local record = 7 + 2 * tonumber(ARGV[6])
local lost = {{'lost'}}
for i = 7, record - 1, 2 do
  if lease(ARGV[i]) ~= ARGV[i + 1] then lost[#lost + 1] = ARGV[i] end
end
if #lost > 1 then return lost end
local expected = tonumber(ARGV[4])
if expected and hash_of(expected) ~= ARGV[5] then return {{'changed', length}} end
if expected and expected ~= length then return {{'refused'}} end
local hash = expected and ARGV[5] or hash_of(length)
local position = string.format('%.0f', length)
redis.call('HSET', handles, ARGV[2], ARGV[3] .. ' ' .. position)
if length == 0 and #ARGV >= record then redis.call('HSET', about, 'begun', '1') end
for i = record, #ARGV do
  hash = string.sub(redis.sha1hex(hash .. ARGV[i]), 1, {HASH_LENGTH})
  redis.call('XADD', log, string.format('%.0f-0', length + 1 + i - record), 'r', ARGV[i] .. hash)
end
return {{'at', length}}
""")

# ARGV: id, microseconds, owner, names.
ACQUIRE = _in_store(_CLOCK, _LEASES)("""
local now, offset = read_clock()
-- Also before a refusal: else a clock that was set back would stand as long as there are only refusals.
keep_clock(now, offset)
local expires = now + tonumber(ARGV[2])
local given = {'given'}
for i = 4, #ARGV do
  local token, ends, owner = lease(ARGV[i])
  if token and ends > now then
    if owner ~= ARGV[3] then return {'taken'} end
    given[i - 2] = token
  else
    given[i - 2] = ''
  end
end
-- At least the time: should the server lose its last writes (a restart, a replica that lagged), tokens still grow.
local last = math.max(tonumber(redis.call('HGET', about, 'token')), now)
for i = 4, #ARGV do
  if given[i - 2] == '' then
    last = last + 1
    given[i - 2] = string.format('%.0f', last)
  end
  keep_lease(ARGV[i], given[i - 2], expires, ARGV[3])
end
redis.call('HSET', about, 'token', string.format('%.0f', last))
return given
""")

# ARGV: id, microseconds, then name and token of each. Returns the names that are not held.
RENEW = _in_store(_CLOCK, _LEASES)("""
local now, offset = read_clock()
keep_clock(now, offset)
local lost = {'lost'}
for i = 3, #ARGV, 2 do
  local token, _, owner = lease(ARGV[i])
  if token == ARGV[i + 1] then
    keep_lease(ARGV[i], token, now + tonumber(ARGV[2]), owner)
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
""")

# ARGV: id, then name and token of each. Needs neither clock nor memory.
RELEASE = _in_store(_LEASES)("""
local lost = {'lost'}
for i = 2, #ARGV, 2 do
  if lease(ARGV[i]) == ARGV[i + 1] then redis.call('HDEL', leases, ARGV[i]) else lost[#lost + 1] = ARGV[i] end
end
return lost
""")

# ARGV: id, name. Writes nothing, so that a replica can execute it.
HOLDER = _in_store(_CLOCK, _LEASES)("""
local now = read_clock()
local token, expires, owner = lease(ARGV[2])
if not token or expires <= now then return {'free'} end
return {'held', owner, token, string.format('%.0f', expires - now)}
""")

# A snapshot is written under a key of its own, the sixth, which expires if its writer dies.
# ARGV: id, seconds for which the key stays, index of the part, the part.
WRITE_PART = _in_store()("""
redis.call('HSET', KEYS[6], ARGV[3], ARGV[4])
redis.call('EXPIRE', KEYS[6], ARGV[2])
return {'written'}
""")

# ARGV: id, the snapshot's id, number of its parts. Changes nothing when it is repeated.
REPLACE_SNAPSHOT = _in_store()("""
if redis.call('HLEN', KEYS[6]) ~= tonumber(ARGV[3]) then return {'late'} end
redis.call('HSET', KEYS[6], 'id', ARGV[2], 'parts', ARGV[3])
redis.call('PERSIST', KEYS[6])
redis.call('RENAME', KEYS[6], snapshot)
return {'replaced'}
""")

# ARGV: id, index of a part. Returns the id of the snapshot, the number of its parts, and this part, false if there is
# none.
READ_PART = _in_store()("""
local known = redis.call('HMGET', snapshot, 'id', 'parts', ARGV[2])
if not known[1] then return {'none'} end
return {'part', known[1], known[2], known[3]}
""")
