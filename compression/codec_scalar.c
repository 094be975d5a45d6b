/* The portable codec. */
#include "compression/codec.h"
#include "compression/vector_scalar.h"

#define CODEC      ob_codec_scalar
#define CODEC_NAME "scalar"
#include "compression/codec_template.h"
