// nccl.h includes this and uses nothing of it.

#pragma once
