#include "ddp/random/random_replay.h"

#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TracerMode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

// A key of LibTorch's dispatcher above all others, off unless a thread includes it. LibTorch has it
// for tests, and has no other one for a mode that is written in C++.
constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

constinit thread_local RandomFrame* innermost = nullptr;
// The generator of the operation that draws now; null: none.
constinit thread_local const at::Generator* drawing = nullptr;
constinit thread_local bool in_traced_draw = false;

bool IsOptionalGenerator(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.type();
  return type->kind() == c10::TypeKind::OptionalType &&
         type->expectRef<c10::OptionalType>().getElementType()->kind() ==
             c10::TypeKind::GeneratorType;
}

bool Draws(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (IsOptionalGenerator(argument)) return true;
  }
  return false;
}

// Returns the place of the generator among the arguments of an operation on the CPU that was called
// without one, or with the default one; null for any other operation.
c10::IValue* MissingGenerator(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const std::vector<c10::Argument>& arguments = schema.arguments();
  c10::IValue* const values = stack.data() + (stack.size() - arguments.size());
  c10::IValue* missing = nullptr;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = values[i];
    if (value.isTensor() && value.toTensor().defined() && !value.toTensor().is_cpu())
      return nullptr;
    if (value.isDevice() && !value.toDevice().is_cpu()) return nullptr;
    if (!IsOptionalGenerator(arguments[i])) continue;
    const bool is_default = value.isGenerator() && value.toGenerator().defined() &&
                            value.toGenerator() == at::detail::getDefaultCPUGenerator();
    if (value.isNone() || is_default) missing = &values[i];
  }
  return missing;
}

}  // namespace

// ---- What an operation draws.

void RandomNumbers::Add(const at::Tensor& before, const at::Tensor& after) {
  const bool continues =
      end_.defined() && before.nbytes() == end_.nbytes() &&
      std::memcmp(before.const_data_ptr(), end_.const_data_ptr(), end_.nbytes()) == 0;
  if (!continues) runs_.push_back({.first_draw = draws_, .state = before});
  end_ = after;
  ++draws_;
}

// The boxed kernel of each operation with a generator.
class RandomDraw {
 public:
  static void Kernel(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
    keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
    const bool leave = innermost == nullptr || in_traced_draw;
    c10::IValue* const place = leave ? nullptr : MissingGenerator(operation.schema(), *stack);
    if (place == nullptr) return operation.redispatchBoxed(keys, stack);
    const auto draw = [&](const at::Generator& generator) {
      *place = generator;
      const auto* const before = std::exchange(drawing, &generator);
      const auto restore = absl::MakeCleanup([before] { drawing = before; });
      operation.redispatchBoxed(keys, stack);
    };
    if (drawing != nullptr) return draw(*drawing);  // a part of an operation that draws
    RandomFrame* replay = innermost;
    while (replay != nullptr && replay->replayed_ == nullptr) replay = replay->outer_;
    if (replay == nullptr && at::tracer::impl::is_dispatch_enabled()) {
      return Traced([&] { operation.redispatchBoxed(keys, stack); });
    }
    if (replay == nullptr) return FromDefault(draw);
    at::Generator& generator = replay->NextOfReplay();
    if (replay == innermost) return draw(generator);
    const at::Tensor before = generator.get_state();
    draw(generator);
    Add(before, generator.get_state(), replay);
  }

 private:
  template <typename Draw>
  static void FromDefault(const Draw& draw) {
    static thread_local at::Generator copy = at::detail::createCPUGenerator();
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    generator.mutex().lock();
    const auto unlock = absl::MakeCleanup([&generator] { generator.mutex().unlock(); });
    const at::Tensor before = generator.get_state();
    copy.set_state(before);
    draw(copy);
    const at::Tensor after = copy.get_state();
    generator.set_state(after);
    Add(before, after, nullptr);
  }

  // A traced graph would keep the copy, so the operation draws from the default generator itself.
  template <typename Draw>
  static void Traced(const Draw& draw) {
    const auto state = [] {
      at::Generator generator = at::detail::getDefaultCPUGenerator();
      generator.mutex().lock();
      const auto unlock = absl::MakeCleanup([&generator] { generator.mutex().unlock(); });
      return generator.get_state();
    };
    const at::Tensor before = state();
    in_traced_draw = true;
    const auto restore = absl::MakeCleanup([] { in_traced_draw = false; });
    draw();
    Add(before, state(), nullptr);
  }

  static void Add(const at::Tensor& before, const at::Tensor& after, const RandomFrame* end) {
    for (RandomFrame* frame = innermost; frame != end; frame = frame->outer_) {
      if (frame->recorded_ != nullptr) frame->recorded_->Add(before, after);
    }
  }
};

namespace {

// The registration of the kernels, in a process that links this file.
class Kernels {
 public:
  static const Kernels& OfProcess() {
    static const auto* const kernels = new Kernels;
    return *kernels;
  }
  const std::string& error() const { return error_; }  // empty: none

 private:
  Kernels() {
    try {
      all_.emplace(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
      all_->fallback(torch::CppFunction::makeFallthrough());
      aten_.emplace(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
      c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
      for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
        if (name.getNamespace() != "aten") continue;
        const auto operation = dispatcher.findSchema(name);
        if (!operation.has_value() || !Draws(operation->schema())) continue;
        const std::string full =
            absl::StrCat(name.name, name.overload_name.empty() ? "" : ".", name.overload_name);
        aten_->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&RandomDraw::Kernel>());
      }
    } catch (const std::exception& error) {
      error_ = MessageOf(error);
    }
  }

  std::optional<torch::Library> all_;
  std::optional<torch::Library> aten_;
  std::string error_;
};

// The dispatcher's tables may not change while other threads use them, so this comes before main().
[[maybe_unused]] const Kernels& registered = Kernels::OfProcess();

}  // namespace

// ---- Frames.

RandomFrame::RandomFrame(RandomNumbers* recorded, const RandomNumbers* replayed)
    : recorded_(recorded), replayed_(replayed) {
  if (recorded == nullptr && replayed == nullptr) return;
  if (const std::string& error = Kernels::OfProcess().error(); !error.empty()) {
    throw ConfigurationError(absl::StrCat(
        "random numbers cannot be drawn again, because another part of the program takes "
        "LibTorch's "
        "dispatch key ",
        c10::toString(kKey), ": set CheckpointOptions::preserve_rng_state to false (", error, ")"));
  }
  if (replayed != nullptr) generator_ = at::detail::createCPUGenerator();
  outer_ = std::exchange(innermost, this);
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

RandomFrame::~RandomFrame() {
  if (recorded_ == nullptr && replayed_ == nullptr) return;
  if (recorded_ != nullptr) recorded_->end_.reset();
  innermost = outer_;
  c10::impl::tls_set_dispatch_key_included(kKey, innermost != nullptr);
}

at::Generator& RandomFrame::NextOfReplay() {
  if (draw_ >= replayed_->draws_) {
    throw ConfigurationError(absl::StrCat(
        "more random numbers are drawn again than were recorded, by ", replayed_->draws_,
        " operation(s): a segment must draw the same numbers each time, by LibTorch's operations "
        "and on its own thread"));
  }
  const std::vector<RandomNumbers::Run>& runs = replayed_->runs_;
  if (run_ < runs.size() && runs[run_].first_draw == draw_) {
    generator_.set_state(runs[run_++].state);
  }
  ++draw_;
  return generator_;
}

}  // namespace ddp::internal
