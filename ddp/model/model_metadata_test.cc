#include "ddp/model/model_metadata.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

ModelMetadata::Tensor Weight() {
  return {.name = "fc.weight",
          .dtype = "float",
          .shape = {10, 4},
          .strides = {4, 1},
          .requires_grad = true};
}

ModelMetadata Model(const ModelMetadata::Tensor& weight) {
  ModelMetadata metadata;
  metadata.AddOption("bucket_cap_mb", "25");
  metadata.AddParameter(weight);
  metadata.AddBuffer({.name = "count", .dtype = "long", .shape = {}, .strides = {}});
  return metadata;
}

std::string Difference(const ModelMetadata& a, const ModelMetadata& b) {
  return ModelMetadata::FirstDifference(a.Serialize(), 0, b.Serialize(), 3);
}

TEST(ModelMetadataTest, EqualModelsHaveEqualHashesAndNoDifference) {
  EXPECT_EQ(Model(Weight()).Hash(), Model(Weight()).Hash());
  EXPECT_EQ(Difference(Model(Weight()), Model(Weight())), "");
}

TEST(ModelMetadataTest, EveryFieldCounts) {
  for (int field = 0; field < 5; ++field) {
    ModelMetadata::Tensor other = Weight();
    if (field == 0) other.name = "fc.bias";
    if (field == 1) other.dtype = "double";
    if (field == 2) other.shape = {4, 10};
    if (field == 3) other.strides = {1, 10};
    if (field == 4) other.requires_grad = false;
    EXPECT_NE(Model(Weight()).Hash(), Model(other).Hash()) << field;
    EXPECT_NE(Difference(Model(Weight()), Model(other)), "") << field;
  }
}

TEST(ModelMetadataTest, NamesTheParameterAndBothRanks) {
  ModelMetadata::Tensor other = Weight();
  other.dtype = "double";
  EXPECT_EQ(Difference(Model(Weight()), Model(other)),
            "parameter 0 is fc.weight float [10, 4] strides [4, 1] requires_grad on rank 0 and "
            "fc.weight double [10, 4] strides [4, 1] requires_grad on rank 3");
}

TEST(ModelMetadataTest, NamesWhatOneRankHasMore) {
  ModelMetadata longer = Model(Weight());
  longer.AddBuffer({.name = "mean", .dtype = "float", .shape = {4}, .strides = {1}});
  EXPECT_EQ(Difference(longer, Model(Weight())),
            "rank 0 has buffer 1 (mean float [4] strides [1]) and rank 3 has not");
  EXPECT_EQ(Difference(Model(Weight()), longer),
            "rank 3 has buffer 1 (mean float [4] strides [1]) and rank 0 has not");
}

// An extra item in the middle on one rank is named, and not compared with the next item.
TEST(ModelMetadataTest, NamesAnOptionThatOneRankHasMore) {
  ModelMetadata more;
  more.AddOption("bucket_cap_mb", "25");
  more.AddOption("params_and_buffers_to_ignore", "fc.bias");
  more.AddParameter(Weight());
  more.AddBuffer({.name = "count", .dtype = "long", .shape = {}, .strides = {}});
  EXPECT_EQ(Difference(more, Model(Weight())),
            "rank 0 has option params_and_buffers_to_ignore (fc.bias) and rank 3 has not");
  EXPECT_EQ(Difference(Model(Weight()), more),
            "rank 3 has option params_and_buffers_to_ignore (fc.bias) and rank 0 has not");
}

TEST(ModelMetadataTest, NamesItemsOfDifferentSorts) {
  ModelMetadata longer;
  longer.AddOption("bucket_cap_mb", "25");
  longer.AddParameter(Weight());
  longer.AddParameter(Weight());
  EXPECT_THAT(
      Difference(Model(Weight()), longer),
      ::testing::HasSubstr("rank 0 has buffer 0 (count long [] strides []) where rank 3 has "
                           "parameter 1"));
}

}  // namespace
}  // namespace ddp::internal
