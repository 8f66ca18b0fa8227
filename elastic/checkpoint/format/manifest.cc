// Length: the writer, the check before writing and the parser of one format, field by field.

#include "elastic/checkpoint/format/manifest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/format/strict_json.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using nlohmann::json;

constexpr int kFormatVersion = 1;
constexpr char kTrailerBegin[] = ",\n\"manifest_xxh3_128\": \"";
constexpr char kTrailerEnd[] = "\"\n}\n";
constexpr size_t kHexDigits = 32;

std::string Trailer(const std::string& body) {
  return absl::StrCat(kTrailerBegin, ContentHash::Of(body).Hex(), kTrailerEnd);
}

std::string Dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// ---- Writing ----

json ToJson(const SamplerState& state) {
  return {{"seed", state.seed},
          {"epoch", state.epoch},
          {"dataset_size", state.dataset_size},
          {"global_batch_size", state.global_batch_size},
          {"cursor", state.cursor},
          {"drop_last", state.drop_last},
          {"order_version", state.order_version}};
}

json ToJson(const OptimizerRecord& optimizer) {
  json groups = json::array();
  for (const OptimizerRecord::Group& group : optimizer.groups) {
    json options = json::object();
    for (const auto& [name, option] : group.options) {
      std::visit([&options, &key = name](const auto& value) { options[key] = value; }, option);
    }
    groups.push_back({{"parameters", group.parameters}, {"options", std::move(options)}});
  }
  return {{"type", optimizer.type}, {"param_groups", groups}, {"steps", optimizer.steps}};
}

json ToJson(const FileRecord& file) {
  return {{"name", file.name}, {"bytes", file.bytes}, {"xxh3_128", file.hash.Hex()}};
}

json ToJson(const TensorRecord& tensor) {
  return {{"name", tensor.name},
          {"file", tensor.file},
          {"dtype", DtypeName(tensor.type.dtype)},
          {"shape", tensor.type.shape},
          {"offset", tensor.offset},
          {"bytes", tensor.bytes},
          {"xxh3_128", tensor.hash.Hex()}};
}

// Writes one record a line, so that people can search a manifest and compare two by line.
template <typename Record>
std::string Lines(const std::vector<Record>& records) {
  std::string text = "[";
  const char* separator = "\n  ";
  for (const Record& record : records) {
    absl::StrAppend(&text, separator, Dump(ToJson(record)));
    separator = ",\n  ";
  }
  return text + "]";
}

// ---- Checking before writing ----

absl::Status CheckNames(const Manifest& manifest) {
  std::vector<const std::string*> names = {&manifest.run_id};
  for (const TensorRecord& tensor : manifest.tensors) names.push_back(&tensor.name);
  for (const auto& [alias, name] : manifest.aliases) {
    names.push_back(&alias);
    names.push_back(&name);
  }
  for (const std::vector<std::string>& bucket : manifest.bucket_layout) {
    for (const std::string& name : bucket) names.push_back(&name);
  }
  if (manifest.optimizer.has_value()) {
    for (const OptimizerRecord::Group& group : manifest.optimizer->groups) {
      for (const std::string& name : group.parameters) names.push_back(&name);
    }
  }
  for (const std::string* name : names) {
    if (IsUtf8(*name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the name \"", absl::CHexEscape(*name),
                     "\" is no UTF-8, which the files' format asks for: rename it"));
  }
  return absl::OkStatus();
}

bool IsFinite(const OptimizerRecord::Option& option) {
  if (const auto* number = std::get_if<double>(&option)) return std::isfinite(*number);
  const auto* numbers = std::get_if<std::vector<double>>(&option);
  return numbers == nullptr || std::all_of(numbers->begin(), numbers->end(),
                                           [](double number) { return std::isfinite(number); });
}

absl::Status CheckOptions(const OptimizerRecord& optimizer) {
  for (size_t i = 0; i < optimizer.groups.size(); ++i) {
    for (const auto& [name, option] : optimizer.groups[i].options) {
      if (IsFinite(option)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the optimizer's option \"", name, "\" of parameter group ", i,
                       " is no finite number: a checkpoint with it could not be loaded"));
    }
  }
  return absl::OkStatus();
}

// ---- Reading ----

// Reads the fields of one object of the manifest. Keeps the first error in `status`; the values
// read after an error are not used.
class Fields {
 public:
  Fields(const json& object, std::string where, absl::Status& status)
      : object_(object), where_(std::move(where)), status_(status) {
    if (!object_.is_object()) Fail("is no object");
  }

  template <typename Integer>
  Integer Int(const std::string& name, Integer low) {
    const json* value = Find(name);
    if (value == nullptr) return low;
    if (value->is_number_unsigned()) {
      const uint64_t number = value->get<uint64_t>();
      const uint64_t max = static_cast<uint64_t>(std::numeric_limits<Integer>::max());
      if (number <= max && static_cast<Integer>(number) >= low) {
        return static_cast<Integer>(number);
      }
    }
    Fail(absl::StrCat("\"", absl::CHexEscape(name), "\" is no whole number in its range"));
    return low;
  }

  double Number(const char* name) {
    const json* value = Find(name);
    if (value != nullptr && value->is_number()) {
      const double number = value->get<double>();
      if (std::isfinite(number)) return number;
    }
    Fail(absl::StrCat("\"", name, "\" is no finite number"));
    return 0;
  }

  bool Bool(const char* name) {
    const json* value = Find(name);
    if (value != nullptr && value->is_boolean()) return value->get<bool>();
    Fail(absl::StrCat("\"", name, "\" is no truth value"));
    return false;
  }

  std::string Text(const char* name) {
    const json* value = Find(name);
    if (value != nullptr && value->is_string()) return value->get<std::string>();
    Fail(absl::StrCat("\"", name, "\" is no text"));
    return "";
  }

  ContentHash Hash(const char* name) {
    absl::StatusOr<ContentHash> hash = ContentHash::FromHex(Text(name));
    if (hash.ok()) return *hash;
    Fail(absl::StrCat("\"", name, "\": ", hash.status().message()));
    return {};
  }

  // Returns null when the field is missing or null.
  const json* Optional(const char* name) {
    const auto found = object_.find(name);
    if (!object_.is_object() || found == object_.end() || found->is_null()) return nullptr;
    return &*found;
  }

  const json& Array(const char* name) {
    static const json kNone = json::array();
    const json* value = Find(name);
    if (value != nullptr && value->is_array()) return *value;
    Fail(absl::StrCat("\"", name, "\" is no list"));
    return kNone;
  }

  const json& Object(const char* name) {
    static const json kNone = json::object();
    const json* value = Find(name);
    if (value != nullptr && value->is_object()) return *value;
    Fail(absl::StrCat("\"", name, "\" is no object"));
    return kNone;
  }

  std::vector<std::string> Texts(const json& list, const char* what) {
    std::vector<std::string> texts;
    if (!list.is_array()) Fail(absl::StrCat(what, " is no list"));
    for (const json& item : list) {
      if (!item.is_string()) {
        Fail(absl::StrCat(what, " has an entry that is no text"));
        break;
      }
      texts.push_back(item.get<std::string>());
    }
    return texts;
  }

  void Fail(const std::string& what) {
    if (status_.ok()) status_ = absl::DataLossError(absl::StrCat(where_, ": ", what));
  }

 private:
  const json* Find(const std::string& name) {
    if (!object_.is_object()) return nullptr;
    const auto found = object_.find(name);
    if (found != object_.end()) return &*found;
    Fail(absl::StrCat("\"", absl::CHexEscape(name), "\" is missing"));
    return nullptr;
  }

  const json& object_;
  const std::string where_;
  absl::Status& status_;
};

SamplerState ParseSampler(const json& object, absl::Status& status) {
  Fields fields(object, "sampler", status);
  SamplerState state;
  state.seed = fields.Int<uint64_t>("seed", 0);
  state.epoch = fields.Int<uint32_t>("epoch", 0);
  state.dataset_size = fields.Int<int64_t>("dataset_size", 1);
  state.global_batch_size = fields.Int<int64_t>("global_batch_size", 1);
  state.cursor = fields.Int<int64_t>("cursor", 0);
  state.drop_last = fields.Bool("drop_last");
  state.order_version = fields.Int<uint32_t>("order_version", 0);
  return state;
}

std::optional<OptimizerRecord::Option> ParseOption(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>();
  if (!value.is_array()) return std::nullopt;
  std::vector<double> numbers;
  for (const json& item : value) {
    if (!item.is_number()) return std::nullopt;
    numbers.push_back(item.get<double>());
  }
  return numbers;
}

OptimizerRecord::Group ParseGroup(const json& object, absl::Status& status) {
  Fields fields(object, "param_groups", status);
  OptimizerRecord::Group group;
  group.parameters = fields.Texts(fields.Array("parameters"), "\"parameters\"");
  for (const auto& [name, value] : fields.Object("options").items()) {
    std::optional<OptimizerRecord::Option> option = ParseOption(value);
    if (option.has_value()) {
      group.options[name] = *std::move(option);
    } else {
      fields.Fail(absl::StrCat("the option \"", absl::CHexEscape(name), "\" is no option"));
    }
  }
  return group;
}

OptimizerRecord ParseOptimizer(const json& object, absl::Status& status) {
  Fields fields(object, "optimizer", status);
  OptimizerRecord optimizer;
  optimizer.type = fields.Text("type");
  for (const json& group : fields.Array("param_groups")) {
    optimizer.groups.push_back(ParseGroup(group, status));
  }
  const json& steps = fields.Object("steps");
  Fields counts(steps, "steps", status);
  for (const auto& [name, value] : steps.items()) {
    optimizer.steps[name] = counts.Int<int64_t>(name, 0);
  }
  return optimizer;
}

bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos && absl::EndsWith(name, ".safetensors");
}

std::vector<FileRecord> ParseFiles(const json& list, absl::Status& status) {
  std::vector<FileRecord> files;
  std::set<std::string> names;
  for (const json& object : list) {
    Fields fields(object, absl::StrCat("files[", files.size(), "]"), status);
    FileRecord file;
    file.name = fields.Text("name");
    file.bytes = fields.Int<uint64_t>("bytes", 0);
    file.hash = fields.Hash("xxh3_128");
    if (!IsPlainFileName(file.name)) fields.Fail("\"name\" is no file name of a checkpoint");
    if (!names.insert(file.name).second) fields.Fail("its name stands twice");
    files.push_back(std::move(file));
    if (!status.ok()) break;
  }
  return files;
}

TensorRecord ParseTensor(const json& object, const std::string& where,
                         const std::map<std::string, uint64_t>& file_bytes, absl::Status& status) {
  Fields fields(object, where, status);
  TensorRecord tensor;
  tensor.name = fields.Text("name");
  tensor.file = fields.Text("file");
  const std::optional<Dtype> dtype = DtypeFromName(fields.Text("dtype"));
  if (!dtype.has_value()) fields.Fail("\"dtype\" is unknown");
  tensor.type.dtype = dtype.value_or(Dtype::kU8);
  for (const json& size : fields.Array("shape")) {
    if (!size.is_number_unsigned()) fields.Fail("\"shape\" has an entry that is no size");
    tensor.type.shape.push_back(size.is_number_unsigned() ? size.get<uint64_t>() : 0);
  }
  tensor.offset = fields.Int<uint64_t>("offset", 0);
  tensor.bytes = fields.Int<uint64_t>("bytes", 0);
  tensor.hash = fields.Hash("xxh3_128");
  if (TensorBytes(tensor.type.dtype, tensor.type.shape) != tensor.bytes) {
    fields.Fail("\"bytes\" does not match its shape");
  }
  const auto file = file_bytes.find(tensor.file);
  if (file == file_bytes.end()) {
    fields.Fail("\"file\" is not among the files");
  } else if (tensor.offset > file->second || tensor.bytes > file->second - tensor.offset) {
    fields.Fail("it lies outside of its file");
  }
  return tensor;
}

std::vector<TensorRecord> ParseTensors(const json& list, const std::vector<FileRecord>& files,
                                       absl::Status& status) {
  std::map<std::string, uint64_t> file_bytes;
  for (const FileRecord& file : files) file_bytes[file.name] = file.bytes;
  std::vector<TensorRecord> tensors;
  std::set<std::string> names;
  for (const json& object : list) {
    const std::string where = absl::StrCat("tensors[", tensors.size(), "]");
    tensors.push_back(ParseTensor(object, where, file_bytes, status));
    if (status.ok() &&
        !names.insert(absl::StrCat(tensors.back().file, "/", tensors.back().name)).second) {
      status = absl::DataLossError(absl::StrCat(where, ": its name stands twice in its file"));
    }
    if (!status.ok()) break;
  }
  return tensors;
}

Manifest ParseBody(const json& root, absl::Status& status) {
  Fields fields(root, "the manifest", status);
  Manifest manifest;
  manifest.id.step = fields.Int<int64_t>("step", 0);
  manifest.id.generation = fields.Int<uint64_t>("generation", 0);
  manifest.epoch = fields.Int<int64_t>("epoch", 0);
  manifest.world_size = fields.Int<int>("world_size", 1);
  manifest.run_id = fields.Text("run_id");
  manifest.generation_nonce = fields.Text("generation_nonce");
  manifest.torch_version = fields.Text("torch_version");
  manifest.saved_unix_seconds = fields.Int<int64_t>("saved_unix_seconds", 0);
  manifest.state_hash = fields.Hash("state_xxh3_128");
  if (fields.Optional("metric") != nullptr) manifest.metric = fields.Number("metric");
  if (const json* sampler = fields.Optional("sampler")) {
    manifest.sampler = ParseSampler(*sampler, status);
  }
  if (const json* optimizer = fields.Optional("optimizer")) {
    manifest.optimizer = ParseOptimizer(*optimizer, status);
  }
  for (const json& bucket : fields.Array("bucket_layout")) {
    manifest.bucket_layout.push_back(fields.Texts(bucket, "\"bucket_layout\""));
  }
  for (const auto& [alias, name] : fields.Object("aliases").items()) {
    if (!name.is_string()) fields.Fail("\"aliases\" has an entry that is no name");
    manifest.aliases[alias] = name.is_string() ? name.get<std::string>() : "";
  }
  manifest.files = ParseFiles(fields.Array("files"), status);
  manifest.tensors = ParseTensors(fields.Array("tensors"), manifest.files, status);
  return manifest;
}

}  // namespace

std::string EncodeManifest(const Manifest& manifest) {
  std::vector<std::pair<const char*, std::string>> fields = {
      {"format_version", absl::StrCat(kFormatVersion)},
      {"step", absl::StrCat(manifest.id.step)},
      {"generation", absl::StrCat(manifest.id.generation)},
      {"generation_nonce", Dump(manifest.generation_nonce)},
      {"run_id", Dump(manifest.run_id)},
      {"epoch", absl::StrCat(manifest.epoch)},
      {"world_size", absl::StrCat(manifest.world_size)},
      {"sampler", manifest.sampler ? Dump(ToJson(*manifest.sampler)) : "null"},
      {"optimizer", manifest.optimizer ? Dump(ToJson(*manifest.optimizer)) : "null"},
      {"bucket_layout", Dump(manifest.bucket_layout)},
      {"aliases", Dump(manifest.aliases)},
      {"torch_version", Dump(manifest.torch_version)},
      {"saved_unix_seconds", absl::StrCat(manifest.saved_unix_seconds)},
      {"state_xxh3_128", Dump(manifest.state_hash.Hex())},
      {"files", Lines(manifest.files)},
      {"tensors", Lines(manifest.tensors)},
  };
  // Optional, so that a manifest without it is the same as before the field existed. Readers of
  // earlier versions ignore it.
  if (manifest.metric.has_value()) fields.push_back({"metric", Dump(*manifest.metric)});
  std::string body = "{";
  const char* separator = "\n";
  for (const auto& [name, value] : fields) {
    absl::StrAppend(&body, separator, "\"", name, "\": ", value);
    separator = ",\n";
  }
  return body + Trailer(body);
}

absl::Status CheckManifest(const Manifest& manifest) {
  DDP_RETURN_IF_ERROR(CheckNames(manifest));
  if (manifest.optimizer.has_value()) DDP_RETURN_IF_ERROR(CheckOptions(*manifest.optimizer));
  if (manifest.metric.has_value() && !std::isfinite(*manifest.metric)) {
    return absl::InvalidArgumentError("the metric is no finite number");
  }
  const absl::StatusOr<Manifest> again = ParseManifest(EncodeManifest(manifest));
  if (!again.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the manifest cannot be written: ", again.status().message()));
  }
  if (*again == manifest) return absl::OkStatus();
  return absl::InvalidArgumentError("the manifest cannot be written: it would be read as another");
}

absl::Status CheckManifestHash(const std::string& text) {
  const size_t trailer_bytes = sizeof(kTrailerBegin) - 1 + kHexDigits + sizeof(kTrailerEnd) - 1;
  if (text.size() < trailer_bytes || text.substr(text.size() - trailer_bytes) !=
                                         Trailer(text.substr(0, text.size() - trailer_bytes))) {
    return absl::DataLossError("the manifest does not match its own XXH3-128");
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> ParseManifest(const std::string& text) {
  // The hash is checked first, so that the parser reads only a text that a save wrote.
  DDP_RETURN_IF_ERROR(CheckManifestHash(text));
  return ParseDamagedManifest(text);
}

absl::StatusOr<Manifest> ParseDamagedManifest(const std::string& text) {
  DDP_ASSIGN_OR_RETURN(const json root, ParseStrictJson(text));
  if (!root.is_object()) return absl::DataLossError("the manifest is no object");
  absl::Status status;
  const int64_t version = Fields(root, "the manifest", status).Int<int64_t>("format_version", 1);
  DDP_RETURN_IF_ERROR(status);
  if (version != kFormatVersion) {
    return absl::UnimplementedError(
        absl::StrCat("it has format version ", version, ", this program knows ", kFormatVersion));
  }
  Manifest manifest = ParseBody(root, status);
  DDP_RETURN_IF_ERROR(status);
  return manifest;
}

std::string EncodeRecords(const WrittenRecords& records) {
  return absl::StrCat("{\"files\": ", Lines(records.files),
                      ", \"tensors\": ", Lines(records.tensors), "}");
}

absl::StatusOr<WrittenRecords> ParseRecords(const std::string& text) {
  DDP_ASSIGN_OR_RETURN(const json root, ParseStrictJson(text));
  absl::Status status;
  Fields fields(root, "the report", status);
  WrittenRecords records;
  records.files = ParseFiles(fields.Array("files"), status);
  records.tensors = ParseTensors(fields.Array("tensors"), records.files, status);
  DDP_RETURN_IF_ERROR(status);
  return records;
}

ContentHash StateHash(const std::vector<TensorRecord>& tensors) {
  std::vector<std::string> lines;
  lines.reserve(tensors.size());
  for (const TensorRecord& tensor : tensors) {
    lines.push_back(absl::StrCat(tensor.name, "\n", TensorTypeText(tensor.type), "\n",
                                 tensor.hash.Hex(), "\n"));
  }
  std::sort(lines.begin(), lines.end());
  ContentHasher hasher;
  for (const std::string& line : lines) hasher.Update(line.data(), line.size());
  return hasher.Digest();
}

}  // namespace ddp::elastic
