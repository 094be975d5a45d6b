# Writes a function __wrap_NAME for each function of the record tests/abi that is among the names on
# standard input. The wrapper makes the call between float_call_begin and float_call_end. The linker's
# --wrap redirects calls of NAME to the wrapper. With -v list=1 the script prints these options of the
# linker. Use: nm LIBRARY | awk -f tests/wrap_calls.awk [-v list=1] - tests/abi/RECORD
FNR == NR {
  if ($2 == "T")
    defined_here[$3]
  next
}
$1 == "function" && $3 in defined_here {
  if (list) {
    print "-Wl,--wrap=" $3
    next
  }
  if (!headers[$2]++)
    print "#include \"onebit/" $2 "\"\n#include \"tests/support_floats.h\""
  match($0, /\(.*\)$/)
  result = substr($0, 1, RSTART - 2)
  sub(/^function [^ ]+ [^ ]+ [^ ]+ /, "", result)
  count = split(substr($0, RSTART + 1, RLENGTH - 2), types, ", ")
  parameters = arguments = ""
  for (i = 1; i <= count && types[1] != "void"; i++) {
    parameters = parameters (i > 1 ? ", " : "") types[i] " a" i
    arguments = arguments (i > 1 ? ", " : "") "a" i
  }
  if (parameters == "")
    parameters = "void"
  call = "__real_" $3 "(" arguments ")"
  print result " __real_" $3 "(" parameters ");\n" result " __wrap_" $3 "(" parameters ");"
  print result " __wrap_" $3 "(" parameters ") {"
  print "  const struct float_call call = float_call_begin();"
  print "  " (result == "void" ? "" : result " result = ") call ";"
  print "  float_call_end(&call, \"" $3 "\");" (result == "void" ? "" : "\n  return result;") "\n}"
}
