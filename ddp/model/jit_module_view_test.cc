#include "ddp/model/jit_module_view.h"

#include <memory>
#include <sstream>
#include <string>

#include <ATen/Functions.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

namespace jit = torch::jit;

at::Tensor Weight() { return at::ones({4, 2}).requires_grad_(); }

// A module with a sparse and a dense embedding. `forward` is the code of its forward.
jit::Module Words(const std::string& forward) {
  const auto unit = std::make_shared<jit::CompilationUnit>();
  jit::Module embedding("Embedding", unit, /*shouldMangle=*/true);
  embedding.register_parameter("weight", Weight(), /*is_buffer=*/false);
  embedding.register_buffer("uses", at::zeros({1}));
  embedding.register_attribute("sparse", c10::BoolType::get(), true);
  embedding.define(R"(
def forward(self, x):
    return torch.embedding(self.weight, x, -1, False, self.sparse)
)");
  jit::Module words("Words", unit, /*shouldMangle=*/true);
  words.register_attribute("training", c10::BoolType::get(), true);
  words.register_parameter("plain", Weight(), /*is_buffer=*/false);
  words.register_module("words", embedding);
  words.define(forward);
  return words;
}

constexpr char kForward[] = R"(
def forward(self, x, both: bool):
    y = self.words.forward(x)
    if both:
        y = y + torch.embedding(self.plain, x, -1, False, False)
    return y
)";

std::vector<std::string> NamesOf(const std::vector<NamedTensor>& items) {
  std::vector<std::string> names;
  for (const NamedTensor& item : items) names.push_back(item.name);
  return names;
}

TEST(JitModuleViewTest, ShowsTheModule) {
  jit::Module words = Words(kForward);
  const JitModuleView view(words);
  EXPECT_THAT(view.name(), HasSubstr("Words"));
  EXPECT_THAT(NamesOf(view.parameters()), ElementsAre("plain", "words.weight"));
  EXPECT_THAT(NamesOf(view.buffers()), ElementsAre("words.uses"));
  EXPECT_TRUE(view.is_training());
  words.eval();
  EXPECT_FALSE(view.is_training());
}

TEST(JitModuleViewTest, ReadsTheModuleAgain) {
  jit::Module words = Words(kForward);
  const JitModuleView view(words);
  const at::Tensor replaced = Weight();
  words.setattr("plain", replaced);
  EXPECT_TRUE(view.parameters()[0].tensor.is_same(replaced));
}

TEST(JitModuleViewTest, MarksWhatTheCodeUsesAsSparse) {
  const jit::Module words = Words(kForward);
  const JitModuleView view(words);
  EXPECT_THAT(view.sparse_parameters(),
              UnorderedElementsAre(view.parameters()[1].tensor.unsafeGetTensorImpl()));

  // Inside a branch, as a constant, with the weight of the module itself; and of a bag.
  const jit::Module branch = Words(R"(
def forward(self, x, both: bool):
    y = x
    if both:
        y = torch.embedding(self.plain, x, -1, False, True)
    return y
)");
  const JitModuleView branch_view(branch);
  EXPECT_THAT(branch_view.sparse_parameters(),
              UnorderedElementsAre(branch_view.parameters()[0].tensor.unsafeGetTensorImpl()));
  const jit::Module bag = Words(R"(
def forward(self, x, offsets):
    return torch.embedding_bag(self.plain, x, offsets, False, 0, True)
)");
  const JitModuleView bag_view(bag);
  EXPECT_THAT(bag_view.sparse_parameters(),
              UnorderedElementsAre(bag_view.parameters()[0].tensor.unsafeGetTensorImpl()));

  // The weight is computed: its gradient is dense.
  const jit::Module computed = Words(R"(
def forward(self, x):
    return torch.embedding(self.plain * 2, x, -1, False, True)
)");
  EXPECT_THAT(JitModuleView(computed).sparse_parameters(), IsEmpty());
}

TEST(JitModuleViewTest, TiedParametersStayTiedInAFile) {
  jit::Module net("Net");
  const at::Tensor weight = Weight();
  net.register_parameter("one", weight, /*is_buffer=*/false);
  net.register_parameter("two", weight, /*is_buffer=*/false);
  net.define("def forward(self, x):\n  return x * self.one + self.two\n");
  std::stringstream file;
  net.save(file);
  const JitModuleView view(jit::load(file));
  ASSERT_THAT(NamesOf(view.parameters()), ElementsAre("one", "two"));
  EXPECT_TRUE(view.parameters()[0].tensor.is_same(view.parameters()[1].tensor));
  EXPECT_TRUE(view.parameters()[0].tensor.requires_grad());
}

template <typename Error>
std::string ErrorOf(const jit::Module& module) {
  try {
    const JitModuleView view(module);
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(JitModuleViewTest, RefusesModulesThatCannotBeTrained) {
  jit::Module silent("Silent");
  silent.register_parameter("weight", Weight(), /*is_buffer=*/false);
  EXPECT_THAT(ErrorOf<ConfigurationError>(silent), HasSubstr("Silent has no method forward"));
  jit::Module constant("Constant");
  constant.register_buffer("weight", Weight());
  constant.define("def forward(self, x):\n  return x * self.weight\n");
  EXPECT_THAT(ErrorOf<ConfigurationError>(constant), HasSubstr("torch.jit.freeze"));
}

}  // namespace
}  // namespace ddp::internal
