// What travels between an agent and the scripts of the rendezvous: replies, pushed texts, offers
// and rows. All of it is parsed here, with bounds: the store is not trusted to make sense.
#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_MESSAGES_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_MESSAGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "store/redis_reply.h"

namespace ddp::elastic {

// `text` as one line that the scripts can keep between others: control characters become blanks,
// and what is longer than 1 KiB is cut.
std::string OneLine(const std::string& text);

// An offer as join.lua takes it.
std::string FormatOffer(const NodeOffer& offer);

// A node's row, as seats.lua writes it. kInternal: it cannot be one.
absl::StatusOr<NodePlacement> ParseRow(const std::string& row);

// What a transition answers: {outcome, generation, nonce, restarts, ...}.
struct ScriptReply {
  std::string outcome;
  GenerationId generation;  // of the job; number 0 before its first
  int restarts = 0;
  std::vector<std::string> rest;

  // `rest[index]`; "" where it ends before.
  std::string text(size_t index) const;
  int64_t number(size_t index, int64_t otherwise) const;
};
absl::StatusOr<ScriptReply> ParseScriptReply(store::RedisReply reply);

// Of the outcomes `round` and `ended`.
absl::StatusOr<Round> ParseRoundReply(const ScriptReply& reply);
JobEnd ParseEndReply(const ScriptReply& reply);

// What open_instance answers.
struct OpenedInstance {
  int64_t number = 0;
  // Tells the job from another one that was given the same number by a server that had lost its
  // memory. Empty: there is no such instance.
  std::string token;
  int64_t lease_ms = 0;
  JobLimits limits;  // of the job, which the node that opened it has given it
};
absl::StatusOr<OpenedInstance> ParseOpenedInstance(const store::RedisReply& reply);

// A text that was pushed to all nodes of a job.
struct PushedMessage {
  // kAbandoned: the job was given up; who still belongs to it asks for the way on.
  enum class Kind { kRound, kOver, kDrain, kEnded, kAbandoned };
  std::string token;  // of the job that it is about
  Kind kind = Kind::kRound;
  GenerationId generation;
  std::string cause;          // kOver, kDrain
  int64_t stop_at_step = -1;  // kDrain
  JobEnd end;                 // kEnded
};
absl::StatusOr<PushedMessage> ParsePushedMessage(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_MESSAGES_H_
