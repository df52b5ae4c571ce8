# bash takes a word with = for several, and puts a reply in the place of the last of them.
_verl() {
    local line=${COMP_LINE:0:COMP_POINT} current cut="" reply
    local -a words
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[${#words[@]} - 1]}
    [[ $current == *=* && $COMP_WORDBREAKS == *=* ]] && cut=${current%%=*}=
    COMPREPLY=()
    while IFS=$'\t' read -r reply _; do
        COMPREPLY+=("${reply#"$cut"}")
    done < <("${words[0]}" completion words "${words[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[./=] ]] && compopt -o nospace
    return 0
}
complete -o default -F _verl verl
