#include "launcher/flags/rendezvous_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr RendezvousKind kPrivate = RendezvousKind::kPrivate;
constexpr RendezvousKind kRedis = RendezvousKind::kRedis;
constexpr RendezvousKind kStatic = RendezvousKind::kStatic;

struct Row {
  const char* what;
  RendezvousRequest request;
  RendezvousKind kind;
  int port;
};

TEST(RendezvousChoiceTest, EveryWayToSayWhereNodesMeet) {
  const std::vector<Row> rows = {
      {"nothing said, one node", {}, kPrivate, 0},
      {"an endpoint", {.has_endpoint = true}, kRedis, 6379},
      {"an endpoint, several nodes",
       {.min_nodes = 2, .max_nodes = 4, .has_endpoint = true},
       kRedis,
       6379},
      {"an endpoint counts over a node rank and a master",
       {.max_nodes = 2, .has_endpoint = true, .has_node_rank = true, .has_master = true},
       kRedis,
       6379},
      {"a node rank", {.min_nodes = 2, .max_nodes = 2, .has_node_rank = true}, kStatic, 0},
      {"a master", {.min_nodes = 2, .max_nodes = 2, .has_master = true}, kStatic, 0},
      {"a master, one node", {.has_master = true}, kStatic, 0},
      {"a node rank, one node", {.has_node_rank = true}, kStatic, 0},
      {"redis", {.max_nodes = 2, .backend = "redis", .has_endpoint = true}, kRedis, 6379},
      {"redis, no endpoint, one node", {.backend = "redis"}, kPrivate, 0},
      {"c10d", {.max_nodes = 2, .backend = "c10d", .has_endpoint = true}, kRedis, 29400},
      {"c10d ignores a node rank and a master, as torchrun does",
       {.backend = "c10d", .has_endpoint = true, .has_node_rank = true, .has_master = true},
       kRedis,
       29400},
      {"c10d, no endpoint, one node", {.backend = "c10d"}, kPrivate, 0},
      {"static", {.max_nodes = 2, .backend = "static"}, kStatic, 0},
      {"static, one node, nothing else", {.backend = "static"}, kStatic, 0},
      {"static with an endpoint", {.backend = "static", .has_endpoint = true}, kStatic, 0},
      {"standalone", {.standalone = true}, kPrivate, 0},
      {"standalone overrides all that is given",
       {.standalone = true, .backend = "c10d", .has_endpoint = true, .has_master = true},
       kPrivate,
       0},
      {"standalone overrides what would be refused",
       {.standalone = true, .backend = "etcd-v2", .has_endpoint = true},
       kPrivate,
       0},
      {"standalone with a MIN of one", {.max_nodes = 4, .standalone = true}, kPrivate, 0},
  };
  for (const Row& row : rows) {
    const absl::StatusOr<RendezvousChoice> choice = ChooseRendezvous(row.request);
    ASSERT_TRUE(choice.ok()) << row.what << ": " << choice.status();
    EXPECT_EQ(choice->kind, row.kind) << row.what;
    EXPECT_EQ(choice->default_port, row.port) << row.what;
    const bool is_c10d = row.request.backend == "c10d" && !row.request.standalone;
    EXPECT_EQ(choice->notice.empty(), !is_c10d) << row.what << ": " << choice->notice;
  }
}

std::string Error(const RendezvousRequest& request) {
  const absl::StatusOr<RendezvousChoice> choice = ChooseRendezvous(request);
  return choice.ok() ? "no error" : std::string(choice.status().message());
}

TEST(RendezvousChoiceTest, SeveralNodesAndNoPlaceNamesBothWays) {
  for (const char* backend : {"", "redis", "c10d"}) {
    EXPECT_THAT(
        Error({.min_nodes = 2, .max_nodes = 2, .backend = backend}),
        AllOf(HasSubstr("--rdzv-endpoint"), HasSubstr("--node-rank"), HasSubstr("--master-addr")))
        << backend;
  }
  EXPECT_THAT(Error({.min_nodes = 1, .max_nodes = 4}), HasSubstr("where do the 4 nodes meet?"));
}

TEST(RendezvousChoiceTest, BackendsThatWeDoNotHave) {
  for (const char* backend : {"etcd", "etcd-v2"}) {
    EXPECT_THAT(Error({.backend = backend, .has_endpoint = true}),
                AllOf(HasSubstr(std::string("--rdzv-backend=") + backend + ": "), HasSubstr("etcd"),
                      HasSubstr("--rdzv-backend=redis")));
  }
  EXPECT_THAT(Error({.backend = "zeus", .backend_flag = "PET_RDZV_BACKEND"}),
              HasSubstr("PET_RDZV_BACKEND=zeus: expected redis, c10d or static"));
  EXPECT_THAT(Error({.backend = "a\nb"}), HasSubstr("=a?b: expected"));
  EXPECT_THAT(Error({.backend = "etcd\n"}), HasSubstr("=etcd?: ddprun does not speak to etcd"));
}

TEST(RendezvousChoiceTest, StandaloneIsForOneNode) {
  EXPECT_THAT(Error({.min_nodes = 2, .max_nodes = 2, .standalone = true}),
              AllOf(HasSubstr("--standalone"), HasSubstr("--rdzv-endpoint")));
  EXPECT_EQ(Error({.min_nodes = 3,
                   .max_nodes = 3,
                   .nodes_flag = "PET_NNODES",
                   .standalone = true,
                   .standalone_flag = "PET_STANDALONE"}),
            "PET_STANDALONE runs one node, and PET_NNODES needs 3: give"
            " --rdzv-endpoint=HOST[:PORT] instead of PET_STANDALONE");
}

}  // namespace
}  // namespace ddp::launcher
