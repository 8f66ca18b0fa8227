#include "ddp/wrapper/model_agreement.h"

#include <string>

#include <ATen/Functions.h>

#include "ddp/common/error.h"
#include "ddp/model/model_metadata.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::RankStore;

ModelMetadata Option(const std::string& value) {
  ModelMetadata metadata;
  metadata.AddOption("cap", value);
  return metadata;
}

// The first rank that differs from rank 0 is named, with one text on every rank. The group is
// intact: the next comparison works.
RANK_TEST(ModelAgreementTest, EveryRankThrowsTheSameFirstDifference, .world_size = 3,
          .stores = {RankStore::kTcpStore}) {
  const auto group = init_process_group();
  AgreeOnModel(*group, Option("25"));
  for (int odd = 0; odd < group->size(); ++odd) {
    const std::string value = group->rank() == odd ? "odd" : "25";
    const int named = odd == 0 ? 1 : odd;
    EXPECT_EQ(ErrorOf<ConfigurationError>([&] { AgreeOnModel(*group, Option(value)); }),
              "the ranks have different models: option cap is " +
                  std::string(odd == 0 ? "odd" : "25") + " on rank 0 and " +
                  (odd == 0 ? "25" : "odd") + " on rank " + std::to_string(named));
    AgreeOnModel(*group, Option("25"));
  }
  EXPECT_EQ(ErrorOf<ConfigurationError>(
                [&] { AgreeOnModel(*group, Option(std::to_string(group->rank())), "comm hooks"); }),
            "the ranks have different comm hooks: option cap is 0 on rank 0 and 1 on rank 1");
  group->barrier();
}

RANK_TEST(ModelAgreementTest, ARankAloneAgreesWithItself, .world_size = 1,
          .stores = {RankStore::kTcpStore}) {
  const auto group = init_process_group();
  AgreeOnModel(*group, Option("25"));
}

}  // namespace
}  // namespace ddp::internal
