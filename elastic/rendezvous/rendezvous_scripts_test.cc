// The scripts under an ACL user of a real server whose rules lack a permission: a refused script
// must have changed nothing. testing/scenarios/rendezvous tests what the scripts do.
#include "elastic/rendezvous/rendezvous_scripts.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis_server/redis_acl.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::elastic {
namespace {

constexpr char kRun[] = "ddp:{digits}:";
constexpr char kJob[] = "ddp:{digits}:i1:";

class RefusedScriptsTest : public ::testing::Test {
 protected:
  using Texts = std::vector<std::string>;
  struct Call {
    ScriptName script;
    Texts keys;
    Texts args;
  };

  RefusedScriptsTest() {
    Texts rules = {"ACL", "SETUSER", "job", "reset", "on", ">secret"};
    for (const auto& rule : absl::StrSplit(store::JobAclRules("digits"), ' ')) {
      rules.emplace_back(rule);
    }
    Root(rules);
    store::RedisEndpoint endpoint = redis_->endpoint();
    endpoint.user = "job";
    endpoint.password = "secret";
    job_ = *store::RedisConnection::Connect(endpoint);
    BeginJob();
  }

  store::RedisReply Root(const Texts& command) {
    auto reply = root_->Command(command);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return *std::move(reply);
  }
  // Changes the rules of the job's user.
  void Rule(const std::string& rule) { Root({"ACL", "SETUSER", "job", rule}); }

  std::string Job(const std::string& field) {
    return Root({"HGET", absl::StrCat(kJob, "job"), field}).AsString().value_or("");
  }

  absl::Status Run(const Call& call) {
    return job_->Eval(scripts_[call.script], call.keys, call.args).status();
  }

  Call Open(const std::string& token) const {
    return {ScriptName::kOpenInstance,
            {absl::StrCat(kRun, "instance"), absl::StrCat(kRun, "opened:", token)},
            EncodeArguments(ScriptName::kOpenInstance, {{"prefix", kRun},
                                                        {"wanted", "0"},
                                                        {"token", token},
                                                        {"is_known", "0"},
                                                        {"fingerprint", ""},
                                                        {"ttl_ms", "86400000"},
                                                        {"request_ttl_ms", "600000"},
                                                        {"lease_ms", "3600000"},
                                                        {"heartbeat_ms", "500000"},
                                                        {"max_restarts", "3"},
                                                        {"min_nodes", "1"},
                                                        {"max_nodes", "2"},
                                                        {"last_call_ms", "0"},
                                                        {"no_progress_limit", "3"},
                                                        {"quarantine_strikes", "3"},
                                                        {"cooldown_ms", "60000"},
                                                        {"max_node_losses", "1000"},
                                                        {"scale_up_delay_ms", "0"},
                                                        {"node_unit", "1"}})};
  }

  // Returns a call of `node` about the current generation.
  Call Transition(ScriptName script, const std::string& node,
                  std::vector<ScriptArgument> arguments) {
    const std::string generation = Job("generation"), nonce = Job("nonce");
    const std::string row =
        Root({"HGET", absl::StrCat(kJob, "members"), node}).AsString().value_or("");
    arguments.insert(arguments.end(), {{"node", node},
                                       {"token", Job("token")},
                                       {"seen_generation", generation},
                                       {"seen_nonce", nonce},
                                       {"seen_restarts", "0"},
                                       {"generation", generation},
                                       {"nonce", nonce},
                                       {"row", row},
                                       {"next_nonce", "next"}});
    return {script,
            {absl::StrCat(kJob, "job"), absl::StrCat(kJob, "leases")},
            EncodeArguments(script, arguments)};
  }
  Call Join(const std::string& node) {
    return Transition(ScriptName::kJoin, node,
                      {{"offer", absl::StrCat("1 2000 -1\ndefault\nhost-", node, "\n127.0.0.1")},
                       {"only_changes", ""},
                       {"program", ""}});
  }
  Call Heartbeat(const std::string& busy_us = "", const std::string& report = "",
                 const std::string& max_world = "", const std::string& at_work = "") {
    return Transition(ScriptName::kHeartbeat, "a",
                      {{"step", "7"},
                       {"rate", "1"},
                       {"busy_us", busy_us},
                       {"report", report},
                       {"max_world", max_world},
                       {"completed", ""},
                       {"at_work", at_work}});
  }

  // Two nodes train, and a third one waits.
  void BeginJob() {
    EXPECT_TRUE(Run(Open("token")).ok());
    for (const char* node : {"a", "b", "c"}) {
      const absl::Status joined = Run(Join(node));
      EXPECT_TRUE(joined.ok()) << joined;
    }
    EXPECT_EQ(Job("state"), "running");
  }

  std::vector<Call> AllCalls() {
    return {Open("another"),
            Join("c"),
            Join("d"),
            Heartbeat("100", "{}", "8", "2500 0 evaluation"),
            Heartbeat(),
            Transition(ScriptName::kReportFailure, "a",
                       {{"rank", "0"},
                        {"host", "host-a"},
                        {"cause", "why"},
                        {"is_victim", "0"},
                        {"step", "7"},
                        {"progress_known", "1"},
                        {"exit_code", "1"},
                        {"instead_of", "-1"},
                        {"grace_ms", "0"}}),
            Transition(ScriptName::kComplete, "a", {}),
            Transition(ScriptName::kDrain, "a", {{"cause", "why"}}),
            Transition(ScriptName::kTakeBack, "a", {}),
            Transition(ScriptName::kLeave, "a", {{"in_order", ""}}),
            Transition(ScriptName::kClose, "a",
                       {{"kind", "closed"}, {"exit_code", "1"}, {"reason", "why"}})};
  }

  std::map<std::string, std::string> Dump() {
    std::map<std::string, std::string> dump;
    const store::RedisReply keys = Root({"KEYS", "*"});
    const absl::Span<const store::RedisReply> names = *keys.AsArray();
    for (const store::RedisReply& key : names) {
      dump[*key.AsString()] = *Root({"DUMP", *key.AsString()}).AsString();
    }
    return dump;
  }
  void Restore(const std::map<std::string, std::string>& dump) {
    Root({"FLUSHALL"});
    for (const auto& [key, value] : dump) Root({"RESTORE", key, "0", value});
  }
  // Returns all keys with their values, in a fixed order.
  std::string Everything() {
    static const store::RedisScript kScript(R"(
      local lines = {}
      for _, key in ipairs(redis.call('KEYS', '*')) do
        local kind = redis.call('TYPE', key).ok
        local held = {}
        if kind == 'string' then
          held = {redis.call('GET', key)}
        elseif kind == 'list' then
          held = redis.call('LRANGE', key, 0, -1)
        elseif kind == 'zset' then
          held = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
        elseif kind == 'set' then
          held = redis.call('SMEMBERS', key)
          table.sort(held)
        else
          local all = redis.call('HGETALL', key)
          for i = 1, #all, 2 do held[#held + 1] = all[i] .. '=' .. all[i + 1] end
          table.sort(held)
        end
        lines[#lines + 1] = key .. ': ' .. table.concat(held, ', ')
      end
      table.sort(lines)
      return table.concat(lines, '\n'))");
    return *root_->Eval(kScript, {}, {})->AsString();
  }

  // Runs each script on the same job, which is restored after each. Returns how many were refused.
  int RefusedOf(const std::vector<Call>& calls, const std::string& what) {
    SCOPED_TRACE(what);
    int refused = 0;
    const auto dump = Dump();
    const std::string before = Everything();
    for (const Call& call : calls) {
      const absl::Status status = Run(call);
      if (status.ok()) {
        Restore(dump);
        continue;
      }
      ++refused;
      EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
      EXPECT_EQ(Everything(), before)
          << ToString(call.script) << " was refused, and has changed something: " << status;
    }
    return refused;
  }

  const RendezvousScripts scripts_;
  const std::unique_ptr<testing::RedisFixture> redis_ = testing::RedisFixture::Start();
  const std::unique_ptr<store::RedisConnection> root_ = redis_->Connect();
  std::unique_ptr<store::RedisConnection> job_;
};

TEST_F(RefusedScriptsTest, WithoutOneOfTheCommandsNothingIsChanged) {
  const std::vector<Call> calls = AllCalls();
  ASSERT_EQ(RefusedOf(calls, "all is allowed"), 0);
  int refused = 0;
  for (const absl::string_view rule : absl::StrSplit(store::JobAclRules("digits"), ' ')) {
    const bool is_script = rule == "+eval" || rule == "+evalsha";
    if (!absl::StartsWith(rule, "+") || is_script || absl::StrContains(rule, "|")) continue;
    const std::string command(rule.substr(1));
    Rule(absl::StrCat("-", command));
    refused += RefusedOf(calls, command);
    Rule(std::string(rule));
  }
  EXPECT_GT(refused, 100);
}

TEST_F(RefusedScriptsTest, WithoutTheChannelNothingIsChanged) {
  const std::vector<Call> calls = AllCalls();
  Rule("resetchannels");
  // The fast path of a heartbeat publishes nothing, so it still succeeds.
  EXPECT_EQ(RefusedOf(calls, "the channel"), static_cast<int>(calls.size()) - 1);
}

TEST_F(RefusedScriptsTest, WithoutOneOfTheKeysNothingIsChanged) {
  const std::vector<Call> calls = AllCalls();
  for (const char* missing : {"leases", "joined", "members", "awaited", "completed", "rows", "busy",
                              "strikes", "quarantine", "lost", "gone", "failures"}) {
    Rule("resetkeys");
    for (const char* key : {"job", "leases", "joined", "members", "awaited", "completed", "rows",
                            "busy", "strikes", "quarantine", "lost", "gone", "failures"}) {
      if (std::string(key) != missing) Rule(absl::StrCat("~", kJob, key));
    }
    Rule(absl::StrCat("~", kRun, "instance"));
    Rule(absl::StrCat("~", kRun, "open:*"));
    Rule(absl::StrCat("~", kJob, "g1.*"));
    Rule(absl::StrCat("~", kRun, "opened:*"));
    EXPECT_GT(RefusedOf(calls, missing), 0) << missing;
  }
}

TEST_F(RefusedScriptsTest, TheRefusalNamesTheCommandAndTheKey) {
  Rule("-publish");
  const absl::Status status = Run(Transition(ScriptName::kDrain, "a", {{"cause", "why"}}));
  EXPECT_TRUE(absl::StrContains(status.message(), "refuse PUBLISH ddp:{digits}:i1:news")) << status;
}

TEST_F(RefusedScriptsTest, AStoreOfAnEarlierGenerationIsDeletedInBatches) {
  const std::string values = absl::StrCat(kJob, "g1.old:store:values");
  for (int i = 0; i < 2500; ++i) Root({"HSET", values, absl::StrCat("key", i), "value"});
  Root({"HSET", absl::StrCat(kJob, "job"), "old_stores", "1.old 2.older "});
  int64_t left = 2500;
  for (int calls = 0; calls < 20 && Job("old_stores") != ""; ++calls) {
    Root({"HSET", absl::StrCat(kJob, "job"), "tick", "0"});
    EXPECT_TRUE(Run(Heartbeat()).ok());
    const int64_t now_left = *Root({"HLEN", values}).AsInteger();
    EXPECT_LE(left - now_left, 1000);
    left = now_left;
  }
  EXPECT_EQ(Job("old_stores"), "");
  EXPECT_EQ(left, 0);
}

TEST_F(RefusedScriptsTest, AServerThatMayEvictKeysSaysSoToUsersWhoMayAsk) {
  const auto policy = [this](const Call& call) {
    return (*job_->Eval(scripts_[call.script], call.keys, call.args)->AsArray())[6].AsString();
  };
  Root({"CONFIG", "SET", "maxmemory-policy", "volatile-lru"});
  Rule("-info");
  EXPECT_EQ(*policy(Open("one")), "") << "this user may not ask";
  Rule("+info");
  EXPECT_EQ(*policy(Open("one")), "") << "no limit of memory";
  Root({"CONFIG", "SET", "maxmemory", "1000000000"});
  EXPECT_EQ(*policy(Open("one")), "volatile-lru");
}

TEST_F(RefusedScriptsTest, AnotherServerGivesAllNodesAWholeLease) {
  // Returns true when a heartbeat freezes membership, a sixth of the lease after the last tick.
  const auto freezes_after = [this](const std::string& server) {
    const int64_t now_s = std::stoll(*(*Root({"TIME"}).AsArray())[0].AsString());
    Root({"HSET", absl::StrCat(kJob, "job"), "server", server, "frozen_until", "0", "tick",
          absl::StrCat(now_s - 600, "000")});
    EXPECT_TRUE(Run(Heartbeat()).ok());
    return Job("frozen_until") != "0";
  };
  EXPECT_NE(Job("server"), "") << "a job's user may ask";
  Rule("-info");
  EXPECT_FALSE(freezes_after("another"));
  Rule("+info");
  EXPECT_FALSE(freezes_after("")) << "a job of an older version";
  const std::string server = Job("server");
  EXPECT_TRUE(absl::StrContains(*Root({"INFO", "server"}).AsString(), "run_id:" + server + "\r"));
  EXPECT_FALSE(freezes_after(server));
  EXPECT_TRUE(freezes_after("another"));
  EXPECT_EQ(Job("server"), server);
}

}  // namespace
}  // namespace ddp::elastic
