// The bytes of a TCPStore client. The requests do not depend on the pieces in which their bytes
// came, and can be written and parsed again. They take memory in proportion to the bytes. The store
// behind the parser answers each request, and keeps none of its memory in the end.
#include "store/tcp_store/tcp_store_protocol.h"

#include <glog/logging.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "store/tcp_store/tcp_store_state.h"
#include "testing/fuzz_target.h"

namespace ddp::store {
namespace {

// Returns the wire form of a request, written from the table in the header.
std::string Encode(const TcpStoreRequest& request) {
  std::string out;
  AppendQuery(out, request.query);
  switch (request.query) {
    case TcpStoreQuery::kValidate:
    case TcpStoreQuery::kPing:
      AppendNumber(out, request.number);
      out.resize(1 + sizeof(uint32_t));
      return out;
    case TcpStoreQuery::kCheck:
    case TcpStoreQuery::kWait:
    case TcpStoreQuery::kMultiGet:
    case TcpStoreQuery::kMultiSet:
      AppendNumber(out, static_cast<int64_t>(request.keys.size()));
      break;
    default:
      break;
  }
  size_t values = 0;
  for (const std::string& key : request.keys) {
    AppendString(out, key);
    if (values < request.values.size()) AppendString(out, request.values[values++]);
  }
  while (values < request.values.size()) AppendString(out, request.values[values++]);
  if (request.query == TcpStoreQuery::kAdd) AppendNumber(out, request.number);
  return out;
}

struct Outcome {
  std::vector<TcpStoreRequest> requests;
  std::vector<std::string> encoded;
  absl::Status status;
};

Outcome Parse(const TcpStoreLimits& limits, const std::vector<std::vector<char>>& pieces) {
  TcpStoreParser parser(&limits);
  Outcome outcome;
  size_t fed = 0;
  for (const std::vector<char>& piece : pieces) {
    parser.Append(piece.data(), piece.size());
    fed += piece.size();
    while (true) {
      absl::StatusOr<std::optional<TcpStoreRequest>> request = parser.Next();
      // A field of 8 bytes costs an entry.
      CHECK_LE(parser.held_bytes(), 1024 + fed * (2 + kTcpStoreEntryBytes / 8));
      outcome.status = request.status();
      if (!request.ok() || !request->has_value()) break;
      outcome.encoded.push_back(Encode(**request));
      outcome.requests.push_back(**std::move(request));
    }
    if (outcome.status.ok()) continue;
    CHECK(absl::IsInvalidArgument(outcome.status)) << outcome.status;
    CHECK(testing::IsOneLine(outcome.status.message())) << outcome.status;
    break;
  }
  return outcome;
}

// Answers the requests of three clients. The bits of `who` choose the client of each request.
void Serve(const TcpStoreLimits& limits, uint64_t who, std::vector<TcpStoreRequest> requests) {
  constexpr TcpStoreState::ClientId kClients = 3;
  const TcpStoreRequest hello = {.query = TcpStoreQuery::kValidate, .number = kTcpStoreMagic};
  TcpStoreState state(&limits);
  TcpStoreState::Replies replies;
  std::vector<std::string> keys;
  for (TcpStoreState::ClientId id = 1; id <= kClients; ++id) state.Connect(id);
  for (TcpStoreRequest& request : requests) {
    const TcpStoreState::ClientId id = 1 + who % kClients;
    who = who / kClients + (who << 40);
    keys.insert(keys.end(), request.keys.begin(), request.keys.end());
    if (!state.IsValidated(id)) CHECK(state.Handle(id, hello, replies).ok());
    if (!state.Handle(id, std::move(request), replies).ok()) {
      state.Disconnect(id, replies);
      state.Connect(id);
    }
    CHECK_LE(state.stored_bytes(), limits.max_stored_bytes);
  }
  // All memory is freed when the clients have gone and their keys are deleted.
  for (TcpStoreState::ClientId id = 1; id <= kClients; ++id) state.Disconnect(id, replies);
  const TcpStoreState::ClientId last = kClients + 1;
  state.Connect(last);
  CHECK(state.Handle(last, hello, replies).ok());
  for (const std::string& key : keys) {
    CHECK(state.Handle(last, {.query = TcpStoreQuery::kDelete, .keys = {key}}, replies).ok());
    const TcpStoreRequest length = {.query = TcpStoreQuery::kQueueLength, .keys = {key}};
    const TcpStoreRequest pop = {.query = TcpStoreQuery::kQueuePop, .keys = {key}};
    std::string none;
    AppendNumber(none, 0);
    while (true) {
      CHECK(state.Handle(last, length, replies).ok());
      if (replies.back().bytes == none) break;
      CHECK(state.Handle(last, pop, replies).ok());
    }
  }
  CHECK_EQ(state.stored_bytes(), 0);
}

std::string Request(TcpStoreQuery query, std::vector<std::string> keys = {},
                    std::vector<std::string> values = {}, int64_t number = 0) {
  return Encode({query, std::move(keys), std::move(values), number});
}

}  // namespace
}  // namespace ddp::store

namespace ddp::testing {

// Input: a byte that says where the pieces end, 8 bytes that choose the client of each request,
// then the connection's bytes.
void FuzzOne(absl::string_view bytes) {
  FuzzInput input(bytes);
  const uint8_t cuts = input.TakeByte();
  const uint64_t who = input.TakeNumber();
  const absl::string_view stream = input.rest();
  const store::TcpStoreLimits limits = {.max_key_bytes = 64,
                                        .max_value_bytes = 128,
                                        .max_keys_per_request = 32,
                                        .max_reply_bytes = 1024,
                                        .max_stored_bytes = 4096,
                                        .max_buffered_bytes = 2048};
  store::Outcome whole = store::Parse(limits, {{stream.begin(), stream.end()}});
  const store::Outcome cut = store::Parse(limits, FuzzPieces(stream, cuts));
  CHECK(whole.encoded == cut.encoded);
  CHECK_EQ(whole.status, cut.status);
  std::string written;
  for (const std::string& request : whole.encoded) written += request;
  CHECK_EQ(written, stream.substr(0, written.size()));
  store::Serve(limits, who, std::move(whole.requests));
}

std::vector<std::string> FuzzSeeds() {
  using Query = store::TcpStoreQuery;
  const auto seed = [](uint64_t who, const std::string& stream) {
    return absl::StrCat("a", FuzzNumber(who), stream);
  };
  return {
      seed(0, store::TcpStoreGreeting(7)),
      seed(0x5b, store::Request(Query::kSet, {"k"}, {"value"}) +
                     store::Request(Query::kCompareSet, {"k"}, {"value", "new"}) +
                     store::Request(Query::kGet, {"k"}) +
                     store::Request(Query::kAppend, {"k"}, {"more"}) +
                     store::Request(Query::kDelete, {"k"})),
      seed(0x1f3, store::Request(Query::kAdd, {"n"}, {}, -7) +
                      store::Request(Query::kMultiSet, {"a", "b"}, {"1", "2"}) +
                      store::Request(Query::kMultiGet, {"a", "b", "c"}) +
                      store::Request(Query::kCheck, {"a", "q"}) + store::Request(Query::kKeyCount) +
                      store::Request(Query::kListKeys) + store::Request(Query::kCheck)),
      seed(0x2a1, store::Request(Query::kWait, {"q"}) + store::Request(Query::kWait, {"q", "a"}) +
                      store::Request(Query::kQueuePush, {"q"}, {"x"}) +
                      store::Request(Query::kQueuePop, {"q"}) +
                      store::Request(Query::kQueueLength, {"q"}) +
                      store::Request(Query::kSet, {"a"}, {""}) +
                      store::Request(Query::kCancelWait))};
}

}  // namespace ddp::testing
