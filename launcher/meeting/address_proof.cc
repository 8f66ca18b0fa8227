#include "launcher/meeting/address_proof.h"

#include <errno.h>
#include <sys/random.h>

#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/hmac_sha256.h"
#include "nlohmann/json.hpp"

namespace ddp::launcher {
namespace {

using Json = nlohmann::json;

constexpr size_t kNonceBytes = 32;
constexpr char kPurpose[] = "ddprun static rendezvous, version 1: node 0's Redis server";

bool IsNonce(const std::string& text) {
  return text.size() == 2 * kNonceBytes && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isxdigit(static_cast<unsigned char>(c));
         });
}

// Returns the HMAC of all fields. Each field follows its length, so that no two lists of fields
// give the same bytes.
std::string Proof(absl::string_view password, const ProvenAddress& address,
                  const std::string& nonce, const std::string& own_nonce) {
  std::string message;
  for (const std::string& field : {std::string(kPurpose), nonce, own_nonce, address.master,
                                   address.host, absl::StrCat(address.port)}) {
    absl::StrAppend(&message, field.size(), ":", field);
  }
  return absl::BytesToHexString(HmacSha256(password, message));
}

std::string TextAt(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

}  // namespace

absl::StatusOr<std::string> MakeNonce() {
  std::string bytes(kNonceBytes, '\0');
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return absl::ErrnoToStatus(errno, "getrandom");
  }
  return absl::BytesToHexString(bytes);
}

std::string AnswerChallenge(absl::string_view password, const ProvenAddress& address,
                            const std::string& nonce, const std::string& own_nonce) {
  if (!IsNonce(nonce)) return "";
  const Json answer = {{"master", address.master},
                       {"host", address.host},
                       {"port", address.port},
                       {"nonce", own_nonce},
                       {"proof", Proof(password, address, nonce, own_nonce)}};
  return answer.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<ProvenAddress> CheckAnswer(absl::string_view password, const std::string& nonce,
                                          const std::string& answer) {
  const Json json = Json::parse(answer, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("port") || !json["port"].is_number_integer()) {
    return absl::DataLossError("the answer to a challenge makes no sense");
  }
  const int64_t port = json["port"].get<int64_t>();
  ProvenAddress address = {.master = TextAt(json, "master"), .host = TextAt(json, "host")};
  const std::string own_nonce = TextAt(json, "nonce");
  if (port < 1 || port > 65535 || address.host.empty() || !IsNonce(own_nonce)) {
    return absl::DataLossError("the answer to a challenge makes no sense");
  }
  address.port = static_cast<int>(port);
  const std::string wanted = Proof(password, address, nonce, own_nonce);
  if (!EqualInConstantTime(wanted, TextAt(json, "proof"))) {
    return absl::UnauthenticatedError("the answer to a challenge proves no password");
  }
  return address;
}

}  // namespace ddp::launcher
