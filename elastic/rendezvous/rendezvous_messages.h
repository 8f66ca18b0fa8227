// Messages between an agent and the scripts of the rendezvous: replies, pushed texts, offers and
// rows. This file parses all of them with bounds, because the store is not trusted.
#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_MESSAGES_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_MESSAGES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/job/job_spec.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::elastic {

// Returns `text` as one line, for the scripts' line-separated fields. Control characters become
// blanks. The text is cut at 1 KiB.
std::string OneLine(const std::string& text);

// Formats an offer for join.lua.
std::string FormatOffer(const NodeOffer& offer);

// Parses a node's row, as seats.lua writes it. Errors: kInternal (not a valid row).
absl::StatusOr<NodePlacement> ParseRow(const std::string& row);

// The reply of every script but open_instance: {outcome, generation, nonce, restarts, ...}.
struct ScriptReply {
  std::string outcome;
  GenerationId generation;  // of the job; number 0 before its first generation
  int restarts = 0;
  std::vector<std::string> rest;

  // Returns `rest[index]`, or "" if `rest` is shorter.
  std::string text(size_t index) const;
  int64_t number(size_t index, int64_t otherwise) const;
};
absl::StatusOr<ScriptReply> ParseScriptReply(store::RedisReply reply);

// Parse the further fields of the outcomes `round` and `ended`.
absl::StatusOr<Round> ParseRoundReply(const ScriptReply& reply);
JobEnd ParseEndReply(const ScriptReply& reply);

// Parses "MILLISECONDS RANK PHASE HOST" of a heartbeat's reply; nullopt for anything else.
std::optional<RankAtWork> ParseRankAtWork(const std::string& text);

// The reply of open_instance.
struct OpenedInstance {
  int64_t number = 0;
  // Secret of the job. It differs where a server lost its memory and gave another job the same
  // number. Empty: there is no such instance.
  std::string token;
  int64_t lease_ms = 0;
  JobLimits limits;             // as set by the node that opened the job
  std::string evicting_policy;  // the server's maxmemory-policy where it may evict keys; else empty
};
absl::StatusOr<OpenedInstance> ParseOpenedInstance(const store::RedisReply& reply);

// A message that was pushed to all nodes of a job.
struct PushedMessage {
  // kAbandoned: all nodes of the job were given up. A node that still belongs to it sends a
  // heartbeat or a join, whose reply tells it to open another instance.
  enum class Kind { kRound, kOver, kDrain, kEnded, kAbandoned };
  std::string token;  // of the job that the message is about
  Kind kind = Kind::kRound;
  GenerationId generation;
  std::string cause;          // kOver, kDrain
  int64_t stop_at_step = -1;  // kDrain
  JobEnd end;                 // kEnded
};
absl::StatusOr<PushedMessage> ParsePushedMessage(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_MESSAGES_H_
