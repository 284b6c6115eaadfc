# abi-table.awk: C declarations to the table of cli/abi.h. Reads two files: constants ("header NAME value"), and the
# preprocessed headers with line markers. What it cannot read is an error: nothing is left out silently.

function fail(what) {
    printf "abi-table.awk: %s: cannot read: %s\n", header, what > "/dev/stderr"
    failed = 1
    exit 1
}

function trim(s) {
    gsub(/[ \t]+/, " ", s)
    gsub(/\( /, "(", s)
    sub(/^ /, "", s)
    sub(/ $/, "", s)
    return s
}

# Splits at a character that stands in no bracket; the parts go to part[1..].
function split_outside(s, at, part,    i, c, depth, n) {
    n = 1
    part[1] = ""
    for (i = 1; i <= length(s); i++) {
        c = substr(s, i, 1)
        if (c ~ /[({[]/) depth++
        if (c ~ /[]})]/) depth--
        if (c == at && depth == 0) part[++n] = ""
        else part[n] = part[n] c
    }
    for (i = 1; i <= n; i++) part[i] = trim(part[i])
    return n
}

# "const char *name", "int64_t dims[6]", "void (*free)(void *)": sets found_name and found_type.
function read_declaration(s,    head, tail) {
    s = trim(s)
    if (match(s, /\(\*[A-Za-z_][A-Za-z0-9_]*\)/)) {
        found_name = substr(s, RSTART + 2, RLENGTH - 3)
        found_type = substr(s, 1, RSTART + 1) substr(s, RSTART + RLENGTH - 1)
        return
    }
    if (match(s, /[A-Za-z_][A-Za-z0-9_]*( *\[[^]]*\])*$/) == 0 || RSTART == 1 || s ~ /:/) fail(s)
    head = trim(substr(s, 1, RSTART - 1))
    tail = substr(s, RSTART)
    found_name = tail
    sub(/[ []+.*/, "", found_name)
    found_type = head substr(tail, length(found_name) + 1)
}

# Parameters of a function as initialisers; sets found_count.
function parameters(s,    part, n, i, text) {
    found_count = 0
    s = trim(s)
    if (s == "void" || s == "") return "{NULL, NULL}"
    n = split_outside(s, ",", part)
    for (i = 1; i <= n; i++) {
        read_declaration(part[i])
        text = text (i > 1 ? ", " : "") "{\"" found_name "\", \"" found_type "\"}"
    }
    found_count = n
    return text
}

function add_field(owner, declaration) {
    read_declaration(declaration)
    printf "    {\"%s\", \"%s\", \"%s\", offsetof(%s, %s), sizeof(((%s *)0)->%s)},\n", found_name, found_type,
        trim(declaration), owner, found_name, owner, found_name
}

function add_struct(name, body,    line, lines, part, parts, i, k, base) {
    printf "static const abi_field fields_of_%s[] = {\n", name
    count = 0
    lines = split_outside(body, ";", line)
    for (i = 1; i <= lines; i++) {
        if (line[i] == "") continue
        parts = split_outside(line[i], ",", part)
        add_field(name, part[1])
        count++
        base = found_type # of "folio_kv_array k, v": the type without its own stars
        sub(/[* ]*(\[.*)?$/, "", base)
        for (k = 2; k <= parts; k++) {
            add_field(name, base " " part[k])
            count++
        }
    }
    print "};"
    structs = structs "    {\"" name "\", \"" header "\", sizeof(" name "), _Alignof(" name "), fields_of_" name ", " \
        count "},\n"
}

function add_enum(name, body,    value, values, i) {
    printf "static const abi_value values_of_%s[] = {\n", name
    values = split_outside(body, ",", value)
    count = 0
    for (i = 1; i <= values; i++) {
        sub(/ *=.*/, "", value[i])
        if (value[i] == "") continue
        if (value[i] !~ /^FOLIO_[A-Z0-9_]+$/) fail(value[i])
        printf "    {\"%s\", %s},\n", value[i], value[i]
        count++
    }
    print "};"
    enums = enums "    {\"" name "\", \"" header "\", sizeof(" name "), values_of_" name ", " count "},\n"
}

# s: "RETURNS NAME(PARAMETERS)"; kind: "functions" or "callbacks".
function add_function(kind, name, returns, list, prototype,    text) {
    text = parameters(list)
    printf "static const abi_parameter parameters_of_%s[] = {%s};\n", name, text
    text = "    {\"" name "\", \"" header "\", \"" returns "\", \"" prototype "\", parameters_of_" name ", " \
        found_count "},\n"
    if (kind == "functions") functions = functions text
    else callbacks = callbacks text
}

# One declaration, without its semicolon.
function declare(s,    open, close_at, name, head) {
    s = trim(s)
    if (s == "") return
    open = index(s, "(")
    if (s ~ /^typedef (struct|enum) [a-z0-9_]+ \{/) {
        name = s
        sub(/.*\} */, "", name)
        head = index(s, "{")
        close_at = length(s)
        while (substr(s, close_at, 1) != "}") close_at--
        if (s ~ /^typedef struct/) add_struct(name, substr(s, head + 1, close_at - head - 1))
        else add_enum(name, substr(s, head + 1, close_at - head - 1))
    } else if (s ~ /^typedef struct [a-z0-9_]+ [a-z0-9_]+$/) {
        name = s
        sub(/.* /, "", name)
        handles = handles "    {\"" name "\", \"" header "\"},\n"
    } else if (match(s, /^typedef [^(]*\(\*[a-z0-9_]+\)\(/)) {
        name = substr(s, 1, RLENGTH - 2)
        sub(/.*\(\*/, "", name)
        head = substr(s, 9, open - 9)
        add_function("callbacks", name, trim(head), substr(s, RLENGTH + 1, length(s) - RLENGTH - 1), substr(s, 9))
    } else if (open > 0 && s ~ /^[a-z]/ && s ~ /\)$/ && s !~ /^typedef/) {
        head = trim(substr(s, 1, open - 1))
        read_declaration(head)
        add_function("functions", found_name, found_type, substr(s, open + 1, length(s) - open - 1), s)
    } else {
        fail(s)
    }
}

BEGIN {
    print "/* Made by cmake/abi-table.sh from the public headers. */"
    print "#include \"abi.h\"\n"
    print "#include <folio/folio.h>\n#include <folio/folio_pool.h>\n#include <folio/folio_vllm06.h>\n#include <stddef.h>\n"
}

FNR == NR { # constants
    value = $0
    sub(/^[^ ]+ [^ ]+ /, "", value)
    constants = constants "    {\"" $2 "\", \"" $1 "\", " \
        (value ~ /^"/ ? $2 ", 0" : "NULL, (int64_t)(" $2 ")") "},\n"
    next
}

/^#/ {
    if ($0 ~ /^# [0-9]+ "/) {
        header = $3
        gsub(/"/, "", header)
        sub(/.*\//, "", header)
    }
    next
}

{
    line = $0
    for (i = 1; i <= length(line); i++) {
        c = substr(line, i, 1)
        if (c == "{") depth++
        if (c == "}") depth--
        if (c == ";" && depth == 0) {
            declare(text)
            text = ""
        } else {
            text = text c
        }
    }
    text = text " "
}

END {
    if (failed) exit 1
    if (trim(text) != "") fail(text)
    printf "\nconst abi_struct abi_structs[] = {\n%s    {NULL, NULL, 0, 0, NULL, 0},\n};\n", structs
    printf "const abi_enum abi_enums[] = {\n%s    {NULL, NULL, 0, NULL, 0},\n};\n", enums
    printf "const abi_constant abi_constants[] = {\n%s    {NULL, NULL, NULL, 0},\n};\n", constants
    printf "const abi_handle abi_handles[] = {\n%s    {NULL, NULL},\n};\n", handles
    printf "const abi_function abi_callbacks[] = {\n%s    {NULL, NULL, NULL, NULL, NULL, 0},\n};\n", callbacks
    printf "const abi_function abi_functions[] = {\n%s    {NULL, NULL, NULL, NULL, NULL, 0},\n};\n", functions
}
