// Challenge and answer by which node 0 of a static rendezvous proves that it knows the job's
// password. Another node requires the proof before it sends the password to the address that node 0
// names.
//
//   node -> node 0   a fresh nonce of 32 bytes
//   node 0 -> node   MASTER, HOST, PORT, a fresh nonce of its own, and
//                    HMAC-SHA256(password, purpose, both nonces, MASTER, HOST, PORT)
//
// MASTER is node 0's own --master-addr and --master-port. HOST and PORT are the address of node 0's
// Redis server. This exchange does not send the password. A program that holds MASTER_PORT without
// the password cannot make an answer. If it relays an answer of the real node 0, that answer names
// the real server. No answer can be replayed: the next question has another nonce.
//
// Known weakness: a program that receives an answer can test passwords against it offline. Choose a
// long random password.
#ifndef DDP_LAUNCHER_MEETING_ADDRESS_PROOF_H_
#define DDP_LAUNCHER_MEETING_ADDRESS_PROOF_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::launcher {

// Node 0's address as its answer states it.
struct ProvenAddress {
  std::string master;  // "HOST:PORT": node 0's --master-addr and --master-port
  std::string host;    // host of node 0's Redis server
  int port = 0;

  friend bool operator==(const ProvenAddress&, const ProvenAddress&) = default;
};

// Returns a fresh nonce as 64 hexadecimal digits. Errors: those of getrandom().
absl::StatusOr<std::string> MakeNonce();

// Returns node 0's answer to the nonce of another node; empty when `nonce` is not a nonce. The
// caller makes `own_nonce` with MakeNonce(), a fresh one for each answer. Pure.
std::string AnswerChallenge(absl::string_view password, const ProvenAddress& address,
                            const std::string& nonce, const std::string& own_nonce);

// Returns the address in `answer`, which the node received for its `nonce`. Nothing in `answer` can
// be trusted before this function returns. Pure.
//
// Errors: kDataLoss (`answer` is malformed), kUnauthenticated (the sender does not know
// `password`).
absl::StatusOr<ProvenAddress> CheckAnswer(absl::string_view password, const std::string& nonce,
                                          const std::string& answer);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_ADDRESS_PROOF_H_
