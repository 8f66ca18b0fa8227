-- The cost of a failure or a loss: the job's budgets of restarts and of losses, the limit of
-- failures without progress, and the strikes of a machine that fails or is lost repeatedly.
--
-- Keys: strikes     hash: host -> strikes of charged failures and losses, and when; they halve in
--                   ten minutes
--       lost        set: hosts that were lost since the job's last step
--       quarantine  hash: host -> the server's time in ms until which it gets a seat only in need
local function forget_failure()
  set('fail_cause', '', 'fail_host', '', 'fail_rank', '', 'fail_exit', '', 'fail_victim', '',
    'fail_at', '', 'fail_progress', '', 'fail_step', '-1')
end

-- Notes the failure that the arguments of report_failure.lua describe. The root cause is the first
-- failure that is not a victim's, or else the first failure. The host of the root cause may replace
-- it by an earlier failure of its own, by that host's clock.
local function note_failure(is_victim)
  local is_earlier = J.fail_host == args.host and J.fail_rank == args.instead_of
  if J.fail_cause == '' or (is_victim ~= '1' and (J.fail_victim == '1' or is_earlier)) then
    set('fail_cause', args.cause, 'fail_host', args.host, 'fail_rank', args.rank,
      'fail_exit', args.exit_code, 'fail_victim', is_victim, 'fail_at', text(now))
  end
  if args.progress_known == '1' and J.fail_progress ~= '1' then
    set('fail_progress', '1')
  end
  if tonumber(args.step) > num('fail_step') then
    set('fail_step', args.step)
  end
end

-- A node that turns out to be lost may take its report back for this long.
local take_back_ms = 100

-- Time in ms that the end of the job still waits for take_back. A restart never waits.
local held_ms = 0

-- A loss excuses all failures, because peers of a lost node fail before its lease expires. A drain
-- excuses only failures that it may have caused: report_failure.lua notes these as victims.
local function is_charged()
  return J.fail_cause ~= '' and
    (J.change == '' or (J.excused ~= '1' and J.fail_victim ~= '1'))
end

-- True where this job counts steps. A job that did so once, and now fails before its first step,
-- has made no step.
local function counts_steps()
  return J.counts_steps == '1' or J.fail_progress == '1' or num('max_step') >= 0
end

local function made_no_step()
  return counts_steps() and num('fail_step') < 0 and num('max_step') < 0
end

-- Returns how the charge of the noted failure would end the job, or nil.
local function verdict()
  if num('restarts') - num('given_back') >= num('max_restarts') then
    return 'budget_spent'
  end
  local limit = num('no_progress_limit')
  if limit > 0 and made_no_step() and num('no_progress') + 1 >= limit then
    return 'no_progress'
  end
end

local function strike(host)
  local hash = key('strikes')
  local all = redis.call('HGETALL', hash)
  local own, total = 1, 1
  for i = 1, #all, 2 do
    local count, at = string.match(all[i + 1], '^(%S+) (%d+)$')
    count = count * 0.5 ^ (math.max(0, now - at) / 600000)
    if all[i] == host then
      own = own + count
    end
    total = total + count
    if count < 0.1 then
      redis.call('HDEL', hash, all[i])
    end
  end
  redis.call('HSET', hash, host, string.format('%.3f %.0f', own, now))
  local limit = num('quarantine_strikes')
  -- Half a strike allows for decay.
  if limit > 0 and own > limit - 0.5 and own * 2 > total then
    redis.call('HSET', key('quarantine'), host, text(now + num('cooldown_ms')))
  end
end

-- Gives back the charge for the end of a generation, after the next one has begun. The restart
-- count stays, because workers have seen it.
local function give_back(generation, nonce)
  local charged, host = string.match(J.charged_of or '', '^(%S+) (.*)$')
  if charged ~= generation .. '.' .. nonce then
    return
  end
  set('charged_of', '', 'given_back', text(num('given_back') + 1),
    'no_progress', text(math.max(0, num('no_progress') - 1)))
  local count, at = string.match(redis.call('HGET', key('strikes'), host) or '', '^(%S+) (%d+)$')
  if count then
    redis.call('HSET', key('strikes'), host, string.format('%.3f %s', math.max(0, count - 1), at))
    redis.call('HDEL', key('quarantine'), host)
  end
end

local function is_quarantined(host)
  local till = redis.call('HGET', key('quarantine'), host)
  if not till then
    return false
  end
  if tonumber(till) > now then
    return true
  end
  redis.call('HDEL', key('quarantine'), host)
  return false
end

-- Counts a loss that has ended the generation. It costs no restart, but has limits of its own. A
-- loss without a step counts as no progress when its host was lost before without a step, or when
-- as many hosts as the job has seats were. Returns false when the job ends of it.
local function count_loss()
  local host, losses, reason = J.lost_host, num('losses') + 1, J.reason
  local again = made_no_step() and (redis.call('SADD', key('lost'), host) == 0 or
    redis.call('SCARD', key('lost')) > num('max_nodes'))
  local no_progress = num('no_progress') + (again and 1 or 0)
  set('losses', text(losses), 'no_progress', text(no_progress), 'lost_host', '')
  redis.call('PEXPIRE', key('lost'), J.ttl_ms)
  strike(host)
  local most, limit = num('max_node_losses'), num('no_progress_limit')
  local kind = losses > most and 'nodes_lost' or
    again and limit > 0 and no_progress >= limit and 'no_progress'
  if kind == 'nodes_lost' then
    reason = string.format('%s, and losses have ended %d generations before (--max-node-losses=%d)',
      reason, losses - 1, most)
  elseif not kind and losses * 2 > most then
    reason = string.format('%s (loss %d of at most %d, --max-node-losses)', reason, losses, most)
  elseif not kind and again and limit > 0 then
    reason = string.format('%s (again without a step, %d of %d, --no-progress-limit)', reason,
      no_progress, limit)
  end
  if kind then
    set('fail_host', host)
    end_job(kind, '1', reason)
    return false
  end
  set('reason', reason)
  return true
end

-- Concludes the generation that is over, before the next one begins: sets its `reason`, and whether
-- it was `charged`. Returns false when the job ends of it, or must wait for take_back before it
-- ends. With `at_once` it does not wait.
local function conclude(at_once)
  if J.counts_steps ~= '1' and counts_steps() then
    set('counts_steps', '1')
  end
  if not made_no_step() then
    set('no_progress', '0')
    redis.call('DEL', key('lost'))
  end
  if not is_charged() then
    if J.fail_cause ~= '' then
      log_failure('0', J.fail_cause)
    elseif J.change ~= '' and J.change == J.over then
      log_failure('0', J.change)
    end
    set('charged', '0', 'reason', J.change ~= '' and J.change or J.over)
    return J.lost_host == '' or count_loss()
  end
  local kind = verdict()
  held_ms = kind and not at_once and math.max(0, num('reported_at') + take_back_ms - now) or 0
  if held_ms > 0 then
    return false
  end
  log_failure(kind and '0' or '1', J.fail_cause)
  if kind then
    end_job(kind, J.fail_exit, J.fail_cause)
    return false
  end
  strike(J.fail_host)
  set('charged_of', J.generation .. '.' .. J.nonce .. ' ' .. J.fail_host)
  set('charged', '1', 'reason', J.fail_cause, 'restarts', text(num('restarts') + 1),
    'no_progress', text(num('no_progress') + (made_no_step() and 1 or 0)))
  return true
end
