// The offer, the answer and the data of a message, each under a Gloo tag of its own.
#include "backend/point_to_point.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "rust/bridge/entries.rs.h"

namespace gflow {
namespace {

// Gloo's tags range from 0 to 2^31 - 1. The user's come first; the others are for the answer to and
// the data of one message.
constexpr int kUserTags = 1 << 30;
constexpr int kAnswers = 1 << 30;
constexpr int kData = kAnswers + (1 << 29);
constexpr int kNumbers = 1 << 29;

// The peer may take part much later than this rank; the wait for the message has its own limit.
constexpr auto kNoLimit = std::chrono::hours(24 * 365);

// An offer, and the answer to it: number of the message, elements, type, whether they match.
enum Field { kNumber, kElements, kType, kFits, kFields };

at::Tensor describe_message(int64_t number, const at::Tensor& tensor, bool fits) {
  return at::tensor({number, tensor.numel(), static_cast<int64_t>(tensor.scalar_type()),
                     static_cast<int64_t>(fits)},
                    at::kLong);
}

std::string in_words(const at::Tensor& message) {
  const auto* fields = message.const_data_ptr<int64_t>();
  return c10::str(fields[kElements], " elements of ",
                  std::string(dtype_name(static_cast<uint8_t>(fields[kType]))));
}

void check(const at::Tensor& tensor, int tag) {
  TORCH_CHECK_VALUE(tag >= 0 && tag < kUserTags, "gflow: the tag of a message must be from 0 to ",
                    kUserTags - 1, ", got ", tag);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous(),
                    "gflow: tensors must be contiguous to be sent or received: call .contiguous()");
}

[[noreturn]] void refuse(const at::Tensor& sent, const at::Tensor& expected, int tag) {
  C10_THROW_ERROR(DistBackendError,
                  c10::str("gflow: send and recv do not fit: the sender has ", in_words(sent),
                           ", the receiver expects ", in_words(expected), " (tag ", tag,
                           "). Both must have the same size and type; no data was exchanged"));
}

}  // namespace

std::function<void()> PointToPoint::begin_send(const at::Tensor& tensor, int to, int tag) {
  check(tensor, tag);
  int number;
  {
    // Offers must go out in the order of their numbers.
    std::lock_guard<std::mutex> lock(mutex_);
    number = static_cast<int>(next_number_[to]++ % kNumbers);
    std::vector<at::Tensor> offer{describe_message(number, tensor, true)};
    std::vector<at::Tensor> answer{at::empty({kFields}, at::kLong)};
    auto sending = gloo_->send(offer, to, tag);
    auto answering = gloo_->recv(answer, to, kAnswers + number);
    return [=, gloo = gloo_] {
      sending->wait(kNoLimit);
      answering->wait(kNoLimit);
      if (answer[0].const_data_ptr<int64_t>()[kFits] == 0) refuse(offer[0], answer[0], tag);
      std::vector<at::Tensor> data{tensor};
      gloo->send(data, to, kData + number)->wait();
    };
  }
}

std::function<int()> PointToPoint::begin_receive(const at::Tensor& tensor, int from, int tag) {
  check(tensor, tag);
  std::vector<at::Tensor> offer{at::empty({kFields}, at::kLong)};
  auto receiving =
      from == kAnySource ? gloo_->recvAnysource(offer, tag) : gloo_->recv(offer, from, tag);
  return [=, gloo = gloo_] {
    receiving->wait(kNoLimit);
    const int source = from == kAnySource ? receiving->sourceRank() : from;
    const auto* fields = offer[0].const_data_ptr<int64_t>();
    const auto number = static_cast<int>(fields[kNumber]);
    const bool fits = fields[kElements] == tensor.numel() &&
                      fields[kType] == static_cast<int64_t>(tensor.scalar_type());
    std::vector<at::Tensor> answer{describe_message(number, tensor, fits)};
    std::vector<at::Tensor> data{tensor};
    // Posted before the answer, so that the buffer is there when the data arrives.
    c10::intrusive_ptr<c10d::Work> receiving_data;
    if (fits) receiving_data = gloo->recv(data, source, kData + number);
    gloo->send(answer, source, kAnswers + number)->wait();
    if (!fits) refuse(offer[0], answer[0], tag);
    receiving_data->wait();
    return source;
  };
}

}  // namespace gflow
