#compdef verl
_verl() {
    local -a whole begun shown shown_begun
    local line name
    for line in "${(@f)$("${words[1]}" completion words "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}"; do
        name=${line%%$'\t'*}
        case $name in
            "") ;;
            *[./=]) begun+=("$name"); shown_begun+=("${line/$'\t'/  -- }") ;;
            *) whole+=("$name"); shown+=("${line/$'\t'/  -- }") ;;
        esac
    done
    if (( ! ${#whole} && ! ${#begun} )); then
        compset -P '*='
        _files
        return
    fi
    (( ${#whole} )) && compadd -l -d shown -a whole
    (( ${#begun} )) && compadd -l -S '' -d shown_begun -a begun
    return 0
}
compdef _verl verl
